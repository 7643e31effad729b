# The checked config, and the helpers that the rules name. (`snakemake --lint` wants functions here, not beside rules.)

import functools
import gc
import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# What Snakemake has imported stays. To look at it for garbage again, while more is imported, takes a fifth of a start.
gc.freeze()
sys.path.insert(0, str(Path("workflow/scripts").resolve()))
import engine_sync

from zerolora.machine import parents
from zerolora.compat.slurm_executor_patches import patch_slurm_executor
from zerolora.compat.snakemake_patches import (
    around_planning,
    explain_system_errors,
    ignore_broken_metadata,
    replace_write_protected_outputs,
    replan_after_same_outputs,
    undetermined,
)
from zerolora.config.schema import data_folders
from zerolora.config.values import HUB_ADAPTERS, HUB_DATA
from zerolora.config.code import chosen_by_run, codes
from zerolora.config.compared import compared
from zerolora.config.expanded import check_expanded
from zerolora.config.file import check_files, load, read_values
from zerolora.errors import UserError, explained
from zerolora.files import canonical
from zerolora.config.fingerprint import Fingerprints
from zerolora.commands.long_argument import argument_of
from zerolora.config.resolve import (
    check_planned,
    check_resolved,
    digest,
    resolve,
    run_sections,
    shared_settings,
    texts,
)
from zerolora.config.sharing import STAGES as SHARED_STAGES
from zerolora.export.targets import TARGETS
from zerolora.config.limits import hardware_limits
from zerolora.config.stages import ON_REQUEST, STAGES

CONFIG_FILE = "config/config.yaml"
RESOLVED = "results/config.json"
FINGERPRINTS = Fingerprints()
LOCK_FILE = "envs/requirements.lock"

engine_sync.put_commands_on_path()
# Commands end when this process, or the shell of their job, does.
parents.name_engine()
shell.prefix("set -euo pipefail; export ZEROLORA_JOB_SHELL=$$; ")
if "DVC_STAGE" in os.environ and workflow.is_main_process:
    parents.end_with_parent()

if workflow.config_settings.config or workflow.config_settings.configfiles:
    raise WorkflowError(
        "--config and --configfile are not read here, since DVC would not see them: edit config/config.yaml, "
        "or add a named set of overrides to its runs"
    )

try:
    explain_system_errors()
    replan_after_same_outputs()
    replace_write_protected_outputs()
    ignore_broken_metadata()
    patch_slurm_executor()
    CONFIG = load(Path(CONFIG_FILE))
    if workflow.is_main_process:
        check_files(Path(CONFIG_FILE), CONFIG)
        if "DVC_STAGE" in os.environ:
            check_expanded(CONFIG)
    VALUES = read_values(Path(CONFIG_FILE))
    STAGE_SETTINGS = resolve(CONFIG)
    SETTINGS = STAGE_SETTINGS.model_dump(mode="json")
    COMPARED = compared(STAGE_SETTINGS)
    CODE = codes(STAGE_SETTINGS, FINGERPRINTS)
    SHARED_SETTINGS = shared_settings(STAGE_SETTINGS.runs)
    if workflow.remote_exec:  # after the plan, by another process
        check_planned(digest(*texts(COMPARED, SHARED_SETTINGS, CODE)))
    elif os.environ.get("DVC_STAGE", "resolve") != "resolve":
        check_resolved(
            *texts(COMPARED, SHARED_SETTINGS, CODE),
            Path(RESOLVED),
            Path("results/settings"),
        )
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
except OSError as error:
    print(explained(error), file=sys.stderr)
    sys.exit(2)

DATASETS = sorted({run.dataset for run in CONFIG.all_runs.values()})
FIRST_RUNS = {
    run.dataset: name for name, run in reversed(CONFIG.all_runs.items())
}  # by data set
# The first run of those that share a packing, an estimate or a choice, by its name and theirs.
FIRST_SHARING = {
    kind: {
        getattr(settings, kind): name
        for name, settings in reversed(STAGE_SETTINGS.runs.items())
    }
    for kind in SHARED_STAGES._fields
}

if workflow.remote_exec:
    # The scheduler that started this job has given it its GPUs (workflow/scripts/on_gpus).
    os.environ.update(ZEROLORA_GPUS_DIVIDED="1")


def limit_jobs():
    """Have jobs of this machine share what the config says that it has, unless --resources or the profile limits them.

    A dry run, which is local whatever the profile says, would show requests for Slurm cut to these limits.
    """
    limits = hardware_limits(
        [run_sections(CONFIG, name) for name in CONFIG.all_runs], os.environ
    )
    if workflow.local_exec and not workflow.dryrun:
        for name in limits.keys() - workflow.global_resources.keys():
            workflow.register_resource(name, limits[name])


wildcard_constraints:
    run="|".join(CONFIG.all_runs),
    packed="|".join(FIRST_SHARING["packed"]),
    estimated="|".join(FIRST_SHARING["estimated"]),
    rendered="|".join(FIRST_SHARING["rendered"]),
    dataset="|".join(CONFIG.prepare),
    model="|".join(SETTINGS["fetch"]),
    source="|".join(SETTINGS["fetch_data"]) or "none",
    packaged="|".join(SETTINGS["fetch_package_data"]) or "none",
    adapter="|".join(SETTINGS["fetch_adapter"]) or "none",
    task="|".join(SETTINGS["tasks"]) or "none",
    target="|".join(TARGETS),


def settings(section, wildcard, stage=None):
    """A params function: the settings a stage reads, as canonical JSON or a file called by its content, so that only
    their values are compared, and keys at their neutral value not at all (config/compared.py).
    """

    def of(wildcards):
        found = COMPARED[section][wildcards[wildcard]]
        return argument_of(found[stage] if stage else found)

    return of


def shared(stage):
    """The same, of a stage that runs may share."""
    kind = next(kind for kind, each in SHARED_STAGES._asdict().items() if each == stage)
    return lambda wildcards: argument_of(SHARED_SETTINGS[wildcards[kind]][stage])


def config_values(wildcards):
    """The config's values. From a function, since Snakemake would take {word} in a plain text for a wildcard."""
    return canonical(VALUES)


def named_run(wildcards):
    """The run that the wildcards name, or the first of those that share what they name; None if they name neither."""
    for kind, runs in FIRST_SHARING.items():
        if kind in wildcards.keys():
            return runs[wildcards[kind]]
    return wildcards.get("run")


def dataset_of(wildcards):
    return wildcards.get("dataset") or CONFIG.all_runs[named_run(wildcards)].dataset


def model_of(wildcards):
    return wildcards.get("model") or CONFIG.prepare[dataset_of(wildcards)].model


def code(stage):
    """A params function: the fingerprint of the code that a stage runs under its settings (config/code.py); DVC reads it
    beside the settings."""
    group, _, rest = {**STAGES, **ON_REQUEST}[stage].settings.partition(".")
    wildcard = rest.partition("}")[0].removeprefix("{")

    def of(wildcards):
        if stage in ON_REQUEST:
            run = STAGE_SETTINGS.runs[wildcards.run]
            target = {"export.targets": {*wildcards.get("target", "").split()}}
            return FINGERPRINTS.of(stage, {**chosen_by_run(run, stage), **target})
        if group in ("runs", "shared"):
            return getattr(CODE, group)[wildcards[wildcard]][stage]
        return CODE.named[stage][wildcards[wildcard]] if wildcard else CODE.named[stage]

    return of


def every_output():
    """Every output of every stage, for what the runs use of the config."""
    paths = [CONFIG.prepare[name].path for name in DATASETS] + [
        task.path for task in CONFIG.tasks.rows.values()
    ]
    manifests = {Path(file) for path in paths for file in manifests_of(Path(path))}
    names = {
        "run": list(CONFIG.all_runs),
        **{kind: list(names) for kind, names in FIRST_SHARING.items()},
        "dataset": DATASETS,
        "model": sorted({CONFIG.prepare[name].model for name in DATASETS}),
        "source": sorted(
            each.parent.name for each in manifests if each.is_relative_to(HUB_DATA)
        ),
        "packaged": sorted(
            each.parent.name for each in manifests if not each.is_relative_to(HUB_DATA)
        ),
        "adapter": list(SETTINGS["fetch_adapter"]),
        "task": list(SETTINGS["tasks"]),
    }
    paths = [path for stage in STAGES for path in getattr(rules, stage).output]
    return [
        expand(path, **{key: names[key] for key in names if f"{{{key}}}" in path})
        for path in paths
        if not path.startswith("results/tasks/")
    ] + expand("results/tasks/{task}.jsonl", task=SETTINGS["task_rows"])


def planned():
    """What resolve has to write."""
    return texts(COMPARED, SHARED_SETTINGS, CODE)


def flattened(paths):
    """The paths of a list that holds lists, as expand() makes them."""
    return [
        str(path)
        for part in paths
        for path in ([part] if isinstance(part, str) else part)
    ]


def read_files():
    """The files of the user's that stages read, whose dates Snakemake compares."""
    paths = [each.path for each in CONFIG.prepare.values()]
    paths += [each.path for each in CONFIG.tasks.rows.values()]
    paths += [each.path for each in CONFIG.fetch.directory.values()]
    return [
        *engine_sync.user_files(),
        *(file for path in paths for file in files_at(Path(path))),
    ]


def fetched(wildcards):
    return f"{model_directory(wildcards)}/manifest.json"


def starting_adapter(wildcards):
    """What an adapter directory that a run goes on from is known by: its manifest, or the files of one of the user's."""
    start = SETTINGS["runs"][wildcards.run]["train"]["from_adapter"]
    if start is None:
        return []
    if Path(start).is_relative_to("results") or Path(start).is_relative_to(
        HUB_ADAPTERS
    ):
        return [str(Path(start) / "manifest.json")]
    return sorted(str(path) for path in Path(start).rglob("*") if path.is_file())


def fetched_adapter(wildcards):
    """The adapter of the hub that a run goes on from, for render to look at. Its age does not matter: a value of render
    does not depend on it, and DVC does not know of it."""
    start = SETTINGS["runs"][named_run(wildcards)]["train"]["from_adapter"]
    if start is None or not Path(start).is_relative_to(HUB_ADAPTERS):
        return []
    return [ancient(str(Path(start) / "manifest.json"))]


def prepared(wildcards):
    return [
        f"{data_directory(wildcards)}/{name}"
        for name in ("manifest.json", "stats.json")
    ]


def packed(wildcards):
    return [
        f"{packing_directory(wildcards)}/{name}"
        for name in ("manifest.json", "stats.json")
    ]


def estimated(wildcards):
    return (
        f"results/{SETTINGS['runs'][named_run(wildcards)]['estimated']}/estimate.json"
    )


def zero_file(wildcards):
    return f"results/{SETTINGS['runs'][wildcards.run]['rendered']}/zero.json"


def reasons_file(wildcards):
    return f"results/{SETTINGS['runs'][wildcards.run]['rendered']}/render.json"


def evaluated_base(wildcards):
    names = ("evaluate.json", "evaluate_resources.json", "answers.json")
    return [f"{base_directory(wildcards)}/{name}" for name in names]


def weights_directory(wildcards):
    return f"resources/weights/{model_of(wildcards)}"


def data_directory(wildcards):
    return f"results/data/{dataset_of(wildcards)}"


def base_directory(wildcards):
    return f"results/base/{dataset_of(wildcards)}"


def model_directory(wildcards):
    return f"resources/models/{model_of(wildcards)}"


def source_files(wildcards):
    """The files of a model that lies in a directory of the user's; others are pinned by the config alone."""
    found = SETTINGS["fetch"][wildcards.model]
    if found["source"] != "directory":
        return []
    return sorted(
        str(path)
        for path in Path(found["path"]).glob("*")
        if path.is_file() and path.name[0] != "."
    )


def data_files(wildcards):
    """The files of a data set, but for fetched ones: those are pinned, and stand for themselves by their manifest."""
    return files_at(Path(CONFIG.prepare[wildcards.dataset].path))


def files_at(path):
    if not path.is_dir():
        return [] if manifests_of(path) else [str(path)]
    folders = [Path(folder) for folder in data_folders(CONFIG.fetch).values()]
    return sorted(
        str(file)
        for file in path.rglob("*")
        if file.is_file()
        and not any(part[0] == "." for part in file.relative_to(path).parts)
        and not any(file.is_relative_to(folder) for folder in folders)
    )


def fetched_data(wildcards):
    return fetched_manifests(wildcards.dataset)


def fetched_manifests(dataset):
    return manifests_of(Path(CONFIG.prepare[dataset].path))


def manifests_of(path):
    """The manifests of the fetched data sets that a path holds, is, or lies in."""
    folders = [Path(folder) for folder in data_folders(CONFIG.fetch).values()]
    return [
        str(folder / "manifest.json")
        for folder in folders
        if folder.is_relative_to(path) or path.is_relative_to(folder)
    ]


def asked_tasks(wildcards):
    """What both models of a run were asked besides its data set."""
    return [
        f"{folder}/tasks/{task}{suffix}.json"
        for folder in (base_directory(wildcards), run_directory(wildcards))
        for task in SETTINGS["runs"][wildcards.run]["report"]["tasks"]
        for suffix in ("", ".answers")
    ]


def task_files(wildcards):
    """The files of a task's rows, as data_files."""
    return files_at(Path(SETTINGS["task_rows"][wildcards.task]["path"]))


def fetched_for_task(wildcards):
    return manifests_of(Path(SETTINGS["task_rows"][wildcards.task]["path"]))


def rows_of_task(wildcards):
    """The file of a task's rows; lm-evaluation-harness reads its own."""
    name = wildcards.task
    return f"results/tasks/{name}.jsonl" if name in SETTINGS["task_rows"] else []


def rows_option(wildcards):
    file = rows_of_task(wildcards)
    return f"--rows {file}" if file else ""


def all_cores(wildcards):
    """The cores that the profile grants; where each job asks for its own, a good many."""
    return workflow.cores or 16


def ranks_here(wildcards):
    return SETTINGS["runs"][wildcards.run]["train"]["ranks_per_node"]


def nodes(wildcards):
    return SETTINGS["runs"][wildcards.run]["train"]["nodes"]


def keep_checkpoints(wildcards):
    return run_sections(CONFIG, wildcards.run).train.keep_checkpoints


def device_of(wildcards):
    """The device that a job's model computes on: the run's, or that of the first run of its data set."""
    if "run" in wildcards.keys():
        return STAGE_SETTINGS.runs[wildcards.run].evaluate.device
    return STAGE_SETTINGS.evaluate[dataset_of(wildcards)].device


def gpus_here(wildcards):
    """GPUs of each node that training needs; none on CPU."""
    return ranks_here(wildcards) if device_of(wildcards) == "cuda" else 0


def all_gpus(wildcards):
    """The same on all nodes, as Snakemake counts them."""
    return nodes(wildcards) * gpus_here(wildcards)


def gres(wildcards):
    """GPUs of each node, in Slurm's words; none on CPU."""
    gpus = gpus_here(wildcards)
    return f"gpu:{gpus}" if gpus else ""


# Loading the memory model takes longer than the rest of this file, so only jobs that ask for memory load it.
def resources_of_prepare(wildcards, threads):
    from zerolora.planner import slurm_resources

    return slurm_resources.preparing(
        Path(CONFIG.prepare[wildcards.dataset].path), threads
    )


def resources_of_train(wildcards, threads):
    from zerolora.planner import slurm_resources

    return slurm_resources.rendered(Path(reasons_file(wildcards)))


def resources_of_merge(wildcards, threads):
    from zerolora.planner import slurm_resources

    return slurm_resources.merging(
        Path(model_directory(wildcards)), Path(adapter_directory(wildcards))
    )


def resources_of_export(wildcards, threads):
    """Those of merging, or of answering where vLLM opens what was exported, which it does on the run's device."""
    if opened_by_vllm(wildcards):
        return resources_of_evaluate(wildcards, threads)
    return resources_of_merge(wildcards, threads)


def resources_of_evaluate(wildcards, threads):
    from zerolora.planner import slurm_resources

    run = STAGE_SETTINGS.runs[run_of(wildcards)]
    return slurm_resources.evaluating(
        STAGE_SETTINGS.evaluate[dataset_of(wildcards)],
        Path(model_directory(wildcards)),
        Path(data_directory(wildcards)),
        run.render,
        run_sections(CONFIG, run_of(wildcards)).hardware.gpus_per_node,
        2 if "run" in wildcards.keys() and run.evaluate.unmerged else 1,
    )


def resources_of_report(wildcards, threads):
    from zerolora.planner import slurm_resources

    return slurm_resources.reporting()


def run_of(wildcards):
    """The run, or the first of those that use a data set: its machines are the ones a job is for."""
    return named_run(wildcards) or FIRST_RUNS.get(
        dataset_of(wildcards), next(iter(CONFIG.all_runs))
    )


def minutes(resources):
    """A resources function: minutes that zerolora asks for a job (planner/slurm_resources.py), twice as many the second time; but
    for training, which goes on where it was."""
    return asked(resources, "minutes")


def memory(resources):
    """A resources function: MiB of a node that zerolora asks for a job, twice as many the second time; but for training,
    whose memory is predicted best, and no more than a machine has. Slurm takes its megabytes for MiB.
    """
    return asked(resources, "mem_mib")


def asked(resources, what):
    def of(wildcards, threads, attempt):
        try:
            found = resources(wildcards, threads)[what]
        except UserError:
            # The files that say it are not there yet; once the job can run, Snakemake asks again.
            return undetermined()
        if resources is not resources_of_train:
            found *= attempt
        machine = SETTINGS["runs"][run_of(wildcards)]["estimate"]["host_memory"]
        return min(found, machine // 1024**2) if what == "mem_mib" else found

    return of


def gpus_of(resources):
    """A resources function: the GPUs that a job of one node needs."""

    def of(wildcards, threads):
        try:
            return resources(wildcards, threads)["gpus"]
        except UserError:
            return undetermined()

    return of


def gres_of(resources):
    """A resources function: the same in Slurm's words."""

    def of(wildcards, threads):
        gpus = gpus_of(resources)(wildcards, threads)
        if isinstance(gpus, str):
            return gpus
        return f"gpu:{gpus}" if gpus else ""

    return of


def exported(wildcards):
    """The manifests of all targets that the runs' `export.targets` list."""
    found = [
        f"results/{run}/export/{target}/manifest.json"
        for run in CONFIG.all_runs
        for target in SETTINGS["runs"][run]["export"]["targets"]
    ]
    if not found:
        raise WorkflowError(
            f"{CONFIG_FILE}: export.targets is empty, so there is nothing to export; write export: {{targets: [gguf]}}, "
            f"or some of {', '.join(TARGETS)}"
        )
    return found


def export_settings(wildcards):
    """The settings of one target, as canonical JSON, so that those of others are not compared."""
    return argument_of(
        compared(getattr(STAGE_SETTINGS.runs[wildcards.run].export, wildcards.target))
    )


def opened_by_vllm(wildcards):
    """Whether vLLM opens a target: it is one for vLLM, and the config has vLLM answer."""
    engine = SETTINGS["evaluate"][dataset_of(wildcards)]["engine"]
    return engine == "vllm" and TARGETS[wildcards.target].for_vllm


def export_options(wildcards):
    """The interpreter with vLLM, for targets that vLLM opens, and its device."""
    if not opened_by_vllm(wildcards):
        return ""
    python = SETTINGS["evaluate"][dataset_of(wildcards)]["vllm_python"] or "python"
    return f"--vllm-python {shlex.quote(python)} --device {export_device(wildcards)}"


def export_device(wildcards):
    """The device that opens a target: the CPU, unless vLLM does."""
    return device_of(wildcards) if opened_by_vllm(wildcards) else "cpu"


def merged_place(wildcards):
    """Where the merged weights lie: in the versioned folder, or outside it if the config does not version them."""
    versioned = SETTINGS["runs"][wildcards.run]["merge"]["version"]
    return (
        f"results/{wildcards.run}/merged"
        if versioned
        else f"work/merged/{wildcards.run}"
    )


def merge_options(wildcards):
    """The options of `zerolora merge` that the config says."""
    merge = SETTINGS["runs"][wildcards.run]["merge"]
    dequantized = ["--dequantized"] if merge["base"] == "dequantized" else []
    return " ".join(dequantized if merge["enabled"] else ["--left-out"])


def judge_settings(wildcards):
    return argument_of(COMPARED["judge"])


def judge_questions(wildcards):
    return SETTINGS["judge"]["questions"]


def comparison_directory(wildcards):
    return "results/compare"


def rows_directory(wildcards):
    return f"{comparison_directory(wildcards)}/rows"


def compare_settings(wildcards):
    return argument_of(COMPARED["compare"])


def packing_directory(wildcards):
    return f"results/{SETTINGS['runs'][named_run(wildcards)]['packed']}/packing"


def run_directory(wildcards):
    return f"results/{wildcards.run}"


def adapter_directory(wildcards):
    return f"results/{wildcards.run}/adapter"
