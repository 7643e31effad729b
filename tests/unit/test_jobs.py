"""Lookups of rules in the config, by the wildcards of a job (workflow/scripts/jobs.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from jobs import Job, Jobs
from snakemake.exceptions import WorkflowError

from zerolora.files import write_json

GPUS = {"device": "cuda", "gpus_per_node": 4, "gpu_memory": "80GiB", "host_memory": "64GiB", "compute_capability": 8.0}
CHANGES: dict[str, Any] = {
    "hardware": {**GPUS, "nodes": 2},
    "runs": {"default": {"dataset": "reference", "train": {"nodes": 2}}},
    "continued": {"further": {"dataset": "reference", "train": {"from_adapter": "results/default/adapter"}}},
    "grids": {"seeds": {"dataset": "reference", "over": {"train.seed": [1, 2]}}},
    "export": {"targets": ["gguf", "vllm_adapter"], "gguf": {"type": "q8_0"}},
}


def jobs_of(directory: Path, **changes: Any) -> Jobs:
    """Return the jobs of a config with these sections in the current directory."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8")) | CHANGES | changes
    config["train"] |= {"global_batch": 32}
    (directory / "config").mkdir()
    (directory / "config/config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (directory / "data").symlink_to(ROOT / "data")
    return Jobs()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Return the jobs of a run on two GPU nodes, of a run that continues it, and of a grid."""
    monkeypatch.chdir(tmp_path)
    return jobs_of(tmp_path)


def test_run_has_the_names_of_its_data_model_and_shared_stages(jobs: Jobs) -> None:
    names = [run for run in jobs.config.all_runs if run not in ("default", "further")]
    one, two = (jobs.of({"run": name}).names for name in names)
    assert one["dataset"] == "reference" and one["model"] == "smollm2-135m-instruct"
    assert one["packed"] == two["packed"] != one["run"]
    assert jobs.of({"packed": one["packed"]}).run == names[0]


def test_settings_and_code_of_a_stage(jobs: Jobs) -> None:
    train = jobs.of({"run": "default"})
    assert json.loads(train.settings("train")) == jobs.compared["runs"]["default"]["train"]
    pack = jobs.of({"packed": train.names["packed"]})
    assert json.loads(pack.settings("pack")) == jobs.shared[train.names["packed"]]["pack"]
    assert train.code("train") == jobs.codes.runs["default"]["train"]
    assert jobs.of({"model": train.names["model"]}).code("fetch") == jobs.codes.named["fetch"][train.names["model"]]
    gguf, vllm = (jobs.of({"run": "default", "target": name}) for name in ("gguf", "vllm_adapter"))
    assert gguf.settings("export_target") != vllm.settings("export_target")
    assert gguf.code("export_target") != vllm.code("export_target")


def test_training_requests_the_gpus_of_each_node_and_of_all(jobs: Jobs) -> None:
    train = jobs.of({"run": "default"})
    requested = {what: train.requested("train", what, 1, 1) for what in ("gpus", "all_gpus", "gres")}
    assert requested == {"gpus": train.ranks, "all_gpus": 2 * train.ranks, "gres": f"gpu:{train.ranks}"}


def test_ranks_on_gpus_request_four_cores_each(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.of({"run": "default"})
    assert job.ranks == 2 and (job.training_cores, job.evaluation_cores) == (8, 4)
    for counted, cores in ((6, 6), (1, 2), (64, 8)):
        hardware = job._run.render.hardware.model_copy(update={"probe": {"hardware": {"cores": counted}}})
        render = job._run.render.model_copy(update={"hardware": hardware})
        monkeypatch.setitem(jobs.resolved.runs, "default", job._run.model_copy(update={"render": render}))
        assert job.training_cores == cores
    evaluate = job._run.evaluate.model_copy(update={"device": "cpu"})
    monkeypatch.setitem(jobs.resolved.runs, "default", job._run.model_copy(update={"evaluate": evaluate}))
    assert (job.training_cores, job.evaluation_cores) == (job.ranks, 2)


def test_stages_that_run_on_one_node_request_its_gpus_once(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = jobs.of({"run": "default"})
    monkeypatch.setattr(Job, "_resources", lambda *_: {"gpus": 3})
    requested = {what: evaluate.requested("evaluate", what, 1, 1) for what in ("gpus", "all_gpus", "gres")}
    assert requested == {"gpus": 3, "all_gpus": 3, "gres": "gpu:3"}


def test_resources_that_depend_on_other_jobs_are_undetermined(jobs: Jobs) -> None:
    assert str(jobs.of({"run": "default"}).requested("train", "minutes", 1, 1)) == "<TBD>"


def test_resources_follow_the_files_and_are_computed_once_for_each_state(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake asks for each resource by itself, and again once the job can run."""
    computed, compute = 0, Job._computed_resources

    def counted(job: Job, stage: str, threads: int) -> Any:
        nonlocal computed
        computed += 1
        return compute(job, stage, threads)

    monkeypatch.setattr(Job, "_computed_resources", counted)
    path = Path(f"results/{jobs.resolved.runs['default'].rendered}/render.json")
    for minutes in (10, 20):
        path.unlink(missing_ok=True)
        write_json(path, {"slurm_resources": {"minutes": minutes, "mem_mib": 100, "gpus": 2}})
        for _ in range(3):  # each time as another job
            job = jobs.of({"run": "default"})
            asked = [job.requested("train", what, 1, 1) for what in ("minutes", "mem_mib")]
            assert asked == [minutes, 100]
    assert computed == 2


def test_retries_request_more_up_to_the_machine(jobs: Jobs) -> None:
    report = jobs.of({"run": "default"})
    once, twice, often = (report.requested("report", "mem_mib", 1, attempt) for attempt in (1, 2, 1000))
    assert twice == 2 * once
    assert often == 64 * 1024


def test_continued_run_depends_on_its_adapter(jobs: Jobs) -> None:
    assert jobs.of({"run": "further"}).start_files == ["results/default/adapter/manifest.json"]
    assert jobs.of({"run": "default"}).start_files == []


def test_every_target_of_every_run_is_exported(jobs: Jobs) -> None:
    assert len(jobs.of({}).exported) == 2 * len(jobs.config.all_runs)


def test_export_without_targets_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = jobs_of(tmp_path, export={"targets": []}).of({})
    with pytest.raises(WorkflowError, match=r"export.targets is empty.*set export: \{targets: \[gguf\]\}"):
        _ = nothing.exported


def test_wildcard_without_names_matches_nothing(jobs: Jobs) -> None:
    assert jobs.constraints()["task"] == "none"
    assert jobs.constraints()["run"] == "|".join(jobs.config.all_runs)


def test_every_job_of_the_runs_is_planned_once(jobs: Jobs) -> None:
    outputs = {"task_rows": ["results/tasks/{task}.jsonl"], "train": ["results/{run}/adapter/manifest.json"]}
    planned = jobs.planned(outputs)
    assert list(planned) == [f"train@{run}" for run in jobs.config.all_runs]
    assert [job.outputs for job in planned.values()] == [
        [f"results/{run}/adapter/manifest.json"] for run in jobs.config.all_runs
    ]
