"""The pipeline on a real Slurm of three nodes: every stage that computes a job, training on two nodes at once."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accounting import size
from cluster import Cluster
from cluster_project import ClusterProject
from conftest import Project, served
from engines import dvc_changed, edit_config, snakemake_would_run
from jobs import GPU_RANK_CORES
from safetensors.torch import load_file
from torch.testing import assert_close

from zerolora.config.settings import EvaluateSettings, RenderSettings, SampleSettings
from zerolora.data.sampled_prompts import size_of
from zerolora.planner import slurm_resources
from zerolora.report.run_settings import settings_of_run
from zerolora.units import gib

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN, REPORT = "rule_train_wildcards_default", "rule_report_wildcards_default"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project], cluster: Cluster) -> ClusterProject:
    """Return a project that `snakemake --profile profiles/slurm all` ran through."""
    project = ClusterProject(make_project("cluster"), cluster)
    sample = {"of": {"base": True}, "dataset": "rows", "n": 2, "max_new_tokens": 8, "batch": 4, "ranks": 2}
    edit_config(project, samples={"own": sample})
    project.snakemake("all")
    return project


@pytest.fixture(scope="module")
def here(project: ClusterProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same training on two ranks of one machine, without Slurm."""
    folder = tmp_path_factory.mktemp("here") / "run"
    command = project.training(folder, nodes=1, ranks_per_node=2)
    result = served(*command, directory=project.directory)
    assert result.returncode == 0, result.stderr
    return folder


def assert_same_adapter(folder: Path, other: Path) -> None:
    one, two = (load_file(path / "adapter/adapter_model.safetensors") for path in (folder, other))
    assert one
    assert_close(one, two, rtol=1e-4, atol=1e-6)


def last_training(project: ClusterProject) -> list[str]:
    """Return what accounting says of the last training job."""
    job = project.jobs(TRAIN)[-1]
    fields = ("State", "NNodes", "Account", "Partition", "ReqTRES", "TimelimitRaw")
    return project.cluster.sacct(job, *fields)


def asked_for_training(project: ClusterProject) -> dict[str, int]:
    """Return what render asks for training."""
    return json.loads((project.directory / "results/default/render.json").read_text())["slurm_resources"]


def usage(project: ClusterProject) -> dict[str, Any]:
    """Return what the report says that training used."""
    return json.loads((project.directory / "results/default/usage.json").read_text())


def test_every_stage_that_computes_was_a_job_and_training_had_two_nodes(project: ClusterProject) -> None:
    """So were those that plan it: of a model that is not fetched yet, nobody knows whether they take torch."""
    stages = ("prepare", "evaluate_base"), ("estimate", "render", "train", "merge", "evaluate", "report")
    comments = [f"rule_{stage}_wildcards_rows" for stage in stages[0]]
    comments += [f"rule_{stage}_wildcards_default" for stage in stages[1]] + ["rule_sample_wildcards_own"]
    assert {comment: len(project.jobs(comment)) for comment in comments} == dict.fromkeys(comments, 1)
    names = {comment: project.cluster.sacct(project.jobs(comment)[0], "JobName") for comment in comments}
    assert names == {comment: ["-".join(comment.split("_wildcards_")).removeprefix("rule_")] for comment in comments}
    *site, tres, minutes = last_training(project)
    assert site == ["COMPLETED", "2", "lab", "normal"]
    wanted = asked_for_training(project)
    assert re.fullmatch(rf"billing=2,cpu=2,mem={2 * wanted['mem_mib']}M,node=2", tres), (tres, wanted)
    assert int(minutes) == wanted["minutes"]


def test_every_job_asks_for_the_time_and_memory_that_were_computed_for_it(project: ClusterProject) -> None:
    results, model = project.directory / "results", project.directory / "resources/models/tiny"
    resolved = json.loads((results / "config.json").read_text())
    render = RenderSettings.model_validate(settings_of_run(results, "default")["render"])
    evaluate = EvaluateSettings.model_validate(resolved["evaluate"]["rows"])
    evaluating = slurm_resources.evaluating(evaluate, model, results / "data/rows", render)
    sample = SampleSettings.model_validate(resolved["samples"]["own"])
    wanted = {
        "prepare_wildcards_rows": slurm_resources.preparing([project.directory / "rows.json"], 1),
        "evaluate_base_wildcards_rows": evaluating,
        "sample_wildcards_own": slurm_resources.sampling(sample, model, *size_of(results / "data/rows"), render),
        "merge_wildcards_default": slurm_resources.merging(model, results / "default/adapter"),
        "evaluate_wildcards_default": evaluating,
        "report_wildcards_default": slurm_resources.reporting(),
        **dict.fromkeys(("estimate_wildcards_default", "render_wildcards_default"), slurm_resources.planning()),
    }
    for name, expected in wanted.items():
        (job,) = project.jobs(f"rule_{name}")
        memory, minutes = project.cluster.sacct(job, "ReqMem", "TimelimitRaw")
        assert (size(memory), int(minutes)) == (expected["mem_mib"] * 1024**2, expected["minutes"]), name
        steps = project.cluster.sacct_steps(job, "JobID", "MaxRSS")
        assert [step for step, _ in steps] == [job, f"{job}.batch"], "a second Snakemake would be a step"
        assert 0 < max(size(text) for _, text in steps) <= size(memory), name


def test_report_compares_predictions_with_slurms_accounting(project: ClusterProject) -> None:
    (job,) = project.jobs(TRAIN)
    elapsed, minutes = project.cluster.sacct(job, "ElapsedRaw", "TimelimitRaw")
    held = max(size(text) for (text,) in project.cluster.sacct_steps(job, "MaxRSS"))
    actual, wanted = usage(project), asked_for_training(project)
    assert actual["accounted_jobs"] == job
    assert actual["accounted_seconds"] == int(elapsed) > 0
    assert actual["accounted_rank_hours"] == pytest.approx(2 * int(elapsed) / 3600)
    assert actual["accounted_host_bytes"] == held
    assert (actual["asked_seconds"], actual["asked_host_bytes"]) == (60 * int(minutes), wanted["mem_mib"] * 1024**2)
    assert (actual["predicted_seconds"], actual["predicted_host_bytes"]) == (wanted["seconds"], wanted["host_bytes"])
    # One rank a node: what it measured of itself is part of what Slurm sees there, if Slurm looks at its peak.
    assert 0.5 * held < actual["measured_host_bytes"] < 1.5 * held
    assert max(held, actual["measured_host_bytes"]) < actual["asked_host_bytes"]
    page = (project.directory / "results/default/report.html").read_text()
    assert f"(job {job})" in page
    assert gib(held) in page and gib(wanted["host_bytes"]) in page


def test_two_nodes_reach_the_losses_of_two_ranks_on_one_machine(project: ClusterProject, here: Path) -> None:
    assert_same_adapter(project.directory / "results/default", here)


def test_ranks_of_a_job_sample_the_bytes_of_one_process_without_slurm(project: ClusterProject, tmp_path: Path) -> None:
    assert len([*project.directory.glob("work/samples/own/*/rank*.jsonl")]) == 2
    options = ("--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"))
    settings = json.loads((project.directory / "results/config.json").read_text())["samples"]["own"] | {"ranks": 1}
    command = ("zerolora", "stage", "sample", "own", *options, "--settings", json.dumps(settings))
    result = served(*command, directory=project.directory)
    assert result.returncode == 0, result.stderr
    answers = [path / "answers.jsonl" for path in (tmp_path / "out", project.directory / "results/samples/own")]
    assert answers[0].read_bytes() == answers[1].read_bytes() != b""


def test_both_engines_have_nothing_to_do_afterwards(project: ClusterProject) -> None:
    assert snakemake_would_run(project) == set()
    assert dvc_changed(project) == set()


def test_a_cancelled_stage_leaves_the_others_of_its_run_in_the_table(project: ClusterProject) -> None:
    """And a refused one is the first line; neither shows the log of the run before."""
    snakemake = ("snakemake", "--profile", "profiles/slurm", "-R", "report", "--set-resources")
    waiting = project.start(*snakemake, "report:slurm_extra=--begin=now+1hour", "--", "all")
    project.cluster.wait(lambda: len(project.jobs(REPORT)) == 2, "the report is submitted", 60)
    job = project.jobs(REPORT)[-1]
    project.run("scancel", job)
    said, _ = waiting.communicate(timeout=120)
    assert f"report-default: job {job} was cancelled" in said and "Traceback" not in said
    table = project.run("zerolora", "show").stdout
    assert re.search(r"^default +failed +zero2 +0\.\d{3} +\d\.\d{3} ", table, re.MULTILINE), table
    assert f"default: failed: report: job {job}: CANCELLED" in table
    refused = project.run(*snakemake, "report:slurm_partition=nowhere", "--", "all", check=False).stderr
    lines = [line for line in refused.splitlines() if not re.search("^Using profile|resolve", line)]
    assert lines[0].startswith("report-default: not submitted: sbatch: invalid partition specified: nowhere; ")
    assert refused.count("not submitted") == 1 and len(project.jobs(REPORT)) == 2
    assert "(+0" not in said + refused  # in the result of the report before
    project.snakemake("all")


def test_the_probe_measures_the_network_between_the_nodes_of_a_job(project: ClusterProject, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    site = ("--nodes=2", "--ntasks=2", "--mem=4000", "--kill-on-bad-exit=1")
    project.run("srun", *site, "zerolora", "probe", "--output", str(output))
    actual = json.loads(output.read_text())
    assert (actual["nodes"], actual["ranks_per_node"]) == (2, 1)
    assert all(actual["measured"][f"network_{name}"] > 0 for name in ("all_reduce_bytes_per_second", "latency_seconds"))


def test_dvc_submits_the_same_job(project: ClusterProject) -> None:
    before = last_training(project)
    edit_config(project, **{"train.learning_rate": 2e-2})
    project.run("dvc", "repro", "train@default")
    assert len(project.jobs(TRAIN)) == 2
    assert last_training(project) == before
    assert "train@default" not in snakemake_would_run(project) | dvc_changed(project)


def test_the_whole_pipeline_may_be_one_job(project: ClusterProject) -> None:
    edit_config(project, **{"train.learning_rate": 3e-2})
    site = ("--account=lab", "--nodes=2", "--cpus-per-task=2", "--mem=4000", "--time=10")
    job = project.run("sbatch", "--parsable", *site, "profiles/allocation/job.sbatch").stdout.strip()
    project.cluster.wait(lambda: project.cluster.job_state(job) in ENDED, "the job ends", 240)
    assert project.cluster.job_state(job) == "COMPLETED", (project.directory / f"zerolora-{job}.log").read_text()
    steps = project.run("sacct", "-n", "-P", "-j", job, "-o", "JobID,NNodes,NTasks").stdout.splitlines()
    assert f"{job}.0|2|2" in steps
    # Of a job that did more than to train, the step counts.
    records = dict(project.cluster.sacct_steps(job, "JobIDRaw", "ElapsedRaw"))
    assert usage(project)["accounted_jobs"] == job
    assert usage(project)["accounted_seconds"] == int(records[f"{job}.0"]) < int(records[job])
    assert snakemake_would_run(project) | dvc_changed(project) == set()


def test_all_tries_of_a_training_are_accounted_for(project: ClusterProject, tmp_path: Path) -> None:
    """A job that is requeued, then another one: three tries, two GPUs each."""
    steps, cluster = tmp_path / "steps", project.cluster
    site = ("--parsable", "--requeue", "--gres=gpu:2", "--mem=500", f"--output={tmp_path}/log")
    command = f"srun workflow/scripts/record_slurm_step {steps} sleep $((2 + 60 * (1 - ${{SLURM_RESTART_COUNT:-0}})))"
    first = project.run("sbatch", *site, f"--wrap={command}").stdout.strip()
    cluster.wait(steps.exists, "the job runs", 60)
    time.sleep(2)
    project.run("scontrol", "requeue", first)
    cluster.wait_job_state(first, "COMPLETED", 120)
    second = project.run(
        "sbatch", *site, f"--wrap=srun workflow/scripts/record_slurm_step {steps} sleep 2"
    ).stdout.strip()
    cluster.wait_job_state(second, "COMPLETED", 60)
    assert steps.read_text().split() == [f"{first}.0", f"{first}.0", f"{second}.0"]
    with steps.open("a") as file:
        file.write("finished\n")
    options = ("-X", "--duplicates")
    seconds = [
        int(text) for job in (first, second) for (text,) in cluster.sacct_steps(job, "ElapsedRaw", options=options)
    ]
    actual = json.loads(project.run("workflow/scripts/accounting.py", str(steps)).stdout)
    assert len(seconds) == 3 and min(seconds) >= 2
    assert (actual["jobs"], actual["seconds"]) == (f"{first} {second}", sum(seconds))
    assert actual["gpu_seconds"] == 2 * sum(seconds)


def test_what_does_not_fit_is_refused_before_it_is_submitted(project: ClusterProject) -> None:
    before = project.jobs(TRAIN)
    edit_config(project, **{"train.learning_rate": 4e-2, "hardware.host_memory": "512MiB"})
    result = project.snakemake("all", check=False)
    assert result.returncode != 0
    text = result.stdout + result.stderr
    assert "render.strategy is zero2 and nothing fits" in text
    assert re.search(r"needs \S+ GiB of a host's 0.50 GiB, headroom included", text)
    assert "Trying to restart" not in text
    assert re.search(r"render default +started", text)  # on the login node: its model has a table, which takes no torch
    assert project.jobs(TRAIN) == before
    edit_config(project, **{"hardware.host_memory": "24GiB"})


def test_runs_with_equal_requests_are_one_job_array(project: ClusterProject) -> None:
    """Two trainings that ask for the same become one array; one that asks for less is a job by itself."""
    changes = {"first": {"seed": 1}, "second": {"seed": 2}, "alone": {"nodes": 1}}
    runs = {run: {"dataset": "rows", "train": change} for run, change in changes.items()}
    edit_config(project, runs=project.config["runs"] | runs)
    adapters = [f"results/{run}/adapter/manifest.json" for run in runs]
    result = project.snakemake(*adapters)
    requests, ids = {}, {}
    for run in runs:
        steps = project.directory / f"results/logs/train/{run}/steps"
        raw = steps.read_text().split(".")[0]
        fields = ("JobIDRaw", "JobID", "ElapsedRaw", "State", "NNodes")
        records = project.cluster.sacct_steps(raw, *fields, options=("-X",))
        ((_, ids[run], seconds, *requests[run]),) = [record for record in records if record[0] == raw]
        accounted = json.loads(project.run("workflow/scripts/accounting.py", str(steps)).stdout)
        assert (accounted["jobs"], accounted["seconds"]) == (raw, int(seconds))
    assert requests == {"first": ["COMPLETED", "2"], "second": ["COMPLETED", "2"], "alone": ["COMPLETED", "1"]}
    array = ids["first"].partition("_")[0]
    assert {ids["first"], ids["second"]} == {f"{array}_1", f"{array}_2"} and "_" not in ids["alone"]
    words = r"train \S+ +submitted as job array \d+: (\S+) (\S+), (\S+) (\S+)\n"
    said = re.search(words, result.stdout + result.stderr)
    assert said and {said[2]: said[1], said[4]: said[3]} == {run: ids[run] for run in ("first", "second")}
    assert project.cluster.sacct(array, "JobName") == [f"train-{said[2]}+{said[4]}"]
    logs = project.directory / ".snakemake/slurm_logs/rule_train"
    assert {path.name for path in logs.glob("*.log")} == {f"{array}_1.log", f"{array}_2.log"}
    weights = {(project.directory / f"results/{run}/adapter/adapter_model.safetensors").read_bytes() for run in runs}
    assert len(weights) == 3


# Without a driver, every GPU counts as usable.
PRETENDED = """

def fault(gpus: int = 1, otherwise: str = "") -> None:
    return None
"""
# In the place of on_gpus: each task writes its arguments and what Slurm gave it, and fails once all have done so, since
# srun ends all tasks with the first that fails.
GIVEN = """#!/bin/sh
echo "$1 $2 $3 $SLURMD_NODENAME $SLURM_STEP_NUM_TASKS $CUDA_VISIBLE_DEVICES" >> "given-$2"
while [ "$(wc -l < "given-$2")" -lt "$SLURM_STEP_NUM_TASKS" ]; do sleep 0.1; done
exit 1
"""


def test_training_gets_its_gpus_on_each_node(project: ClusterProject) -> None:
    """Two GPUs of one node, and of each of two; nothing computes on them. Slow: two real jobs."""
    gpus = {"device": "cuda", "gpus_per_node": 4, "gpu_memory": "80GiB", "compute_capability": 8.0, "nodes": 2}
    runs = {
        f"on{nodes}": {"dataset": "rows", "train": {"nodes": nodes, "ranks_per_node": 2, "global_batch": 8}}
        for nodes in (1, 2)
    }
    edit_config(project, hardware=gpus | {"host_memory": "24GiB"}, runs=runs)
    devices = project.directory / "src/zerolora/machine/devices.py"
    devices.write_text(devices.read_text(encoding="utf-8") + PRETENDED, encoding="utf-8")
    (project.directory / "workflow/scripts/on_gpus").write_text(GIVEN, encoding="utf-8")
    options = ("--keep-going", "--retries", "0", "--rerun-triggers", "mtime")
    result = project.snakemake(*options, "--", *(f"results/{run}/adapter/manifest.json" for run in runs), check=False)
    for run, nodes in (("on1", 1), ("on2", 2)):
        ids = project.jobs(f"rule_train_wildcards_{run}")
        assert len(ids) == 1, result.stdout + result.stderr
        tres, minutes = project.cluster.sacct(ids[0], "AllocTRES", "TimelimitRaw")
        allocated = dict(each.split("=") for each in tres.split(","))
        wanted = json.loads((project.directory / f"results/{run}/render.json").read_text())["slurm_resources"]
        assert size(allocated["mem"]) == nodes * wanted["mem_mib"] * 1024**2
        assert int(minutes) == wanted["minutes"]
        expected = {"node": nodes, "cpu": nodes * 2 * GPU_RANK_CORES, "gres/gpu": nodes * 2}
        assert {name: int(allocated[name]) for name in expected} == expected
        tasks = [line.split() for line in (project.directory / f"given-{nodes}").read_text().splitlines()]
        assert len({node for *_, node, _, _ in tasks}) == len(tasks) == nodes
        assert {(*asked, count) for *asked, _, count, _ in tasks} == {("2", str(nodes), str(2 * nodes), str(nodes))}
        assert all(re.fullmatch("[0-3],[0-3]", shown) and shown[0] != shown[2] for *_, shown in tasks), tasks
