# The checked config, and the helpers that the rules name. (`snakemake --lint` wants functions here, not beside rules.)

import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path("workflow/scripts").resolve()))
import agreement

from zerolora.config import HUB_DATA
from zerolora.config_file import load, read_values
from zerolora.errors import UserError
from zerolora.files import canonical
from zerolora.resolve import resolve

CONFIG_FILE = "config/config.yaml"
RESOLVED = "results/config.json"
LOCK_FILE = "envs/requirements.lock"

agreement.find_commands()
agreement.judge_afresh()

if workflow.config_settings.config or workflow.config_settings.configfiles:
    raise WorkflowError(
        "--config and --configfile are not read here, since DVC would not see them: edit config/config.yaml, "
        "or add a named set of overrides to its runs"
    )

try:
    CONFIG = load(Path(CONFIG_FILE))
    VALUES = read_values(Path(CONFIG_FILE))
    SETTINGS = resolve(CONFIG)
except UserError as error:
    sys.exit(str(error))


wildcard_constraints:
    run="|".join(CONFIG.runs),
    dataset="|".join(CONFIG.prepare),
    model="|".join(SETTINGS["fetch"]),
    source="|".join(SETTINGS["fetch_data"]) or "none",


def settings(section, wildcard, stage=None):
    """A params function: the settings a stage reads, as canonical JSON, so that only their values are compared."""

    def of(wildcards):
        found = SETTINGS[section][wildcards[wildcard]]
        return canonical(found[stage] if stage else found)

    return of


def dataset_of(wildcards):
    return wildcards.get("dataset") or CONFIG.runs[wildcards.run].dataset


def model_of(wildcards):
    return wildcards.get("model") or CONFIG.prepare[dataset_of(wildcards)].model


def code(stage):
    """Rule file and modules that a stage runs, as dvc.yaml lists them: both engines watch the same files."""
    return agreement.code_of(stage)


def fetched(wildcards):
    return f"{model_directory(wildcards)}/manifest.json"


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
    path = Path(CONFIG.prepare[wildcards.dataset].path)
    if not path.is_dir():
        return [] if fetched_data(wildcards) else [str(path)]
    folders = [Path(HUB_DATA) / name for name in SETTINGS["fetch_data"]]
    return sorted(
        str(file)
        for file in path.rglob("*")
        if file.is_file()
        and not any(part[0] == "." for part in file.relative_to(path).parts)
        and not any(file.is_relative_to(folder) for folder in folders)
    )


def fetched_data(wildcards):
    """The manifests of the fetched data sets that a data set's path holds, is, or lies in."""
    path = Path(CONFIG.prepare[wildcards.dataset].path)
    folders = [Path(HUB_DATA) / name for name in SETTINGS["fetch_data"]]
    return [
        str(folder / "manifest.json")
        for folder in folders
        if folder.is_relative_to(path) or path.is_relative_to(folder)
    ]


def all_cores(wildcards):
    """The cores that the profile grants; where each job asks for its own, a good many."""
    return workflow.cores or 16


def ranks_here(wildcards):
    return SETTINGS["runs"][wildcards.run]["train"]["ranks_per_node"]


def nodes(wildcards):
    return SETTINGS["runs"][wildcards.run]["train"]["nodes"]


def gres(wildcards):
    """GPUs of each node, in Slurm's words; none on CPU."""
    train = SETTINGS["runs"][wildcards.run]["train"]
    return f"gpu:{train['ranks_per_node']}" if train["device"] == "cuda" else ""


def merged_place(wildcards):
    """Where the merged weights lie: in the versioned folder, or outside it if the config does not version them."""
    versioned = SETTINGS["runs"][wildcards.run]["merge"]["version"]
    return (
        f"results/{wildcards.run}/merged"
        if versioned
        else f"work/merged/{wildcards.run}"
    )


def evaluate_settings(wildcards):
    return canonical(SETTINGS["evaluate"][dataset_of(wildcards)])


def packing_directory(wildcards):
    return f"results/{wildcards.run}/packing"


def run_directory(wildcards):
    return f"results/{wildcards.run}"


def adapter_directory(wildcards):
    return f"results/{wildcards.run}/adapter"
