"""Inputs, params and resources of the workflow's jobs, looked up in the config by a job's wildcards.

The rules use attributes of `Job`, a stage's settings or code, or a stage's resources (rules/common.smk).
"""

import functools
import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from receipts import Hashes, files_below
from snakemake.exceptions import WorkflowError
from snakemake.io import ancient, expand, local

from zerolora.commands.long_argument import argument_of
from zerolora.compat.snakemake_patches import undetermined
from zerolora.config import file
from zerolora.config.code import Codes, chosen_by_run, codes, codes_of_today
from zerolora.config.compared import compared
from zerolora.config.fingerprint import Fingerprints
from zerolora.config.grids import SHARED_STAGES
from zerolora.config.made_files import MadeFolder, made_folders
from zerolora.config.overrides import RunOverrides, origin_line
from zerolora.config.resolve import check_planned, check_resolved, digest, resolve, run_sections, shared_settings, texts
from zerolora.config.runs_file import check_runs
from zerolora.config.sample_sections import Sample
from zerolora.config.settings import RunSettings
from zerolora.config.stages import ALL_STAGES, ON_REQUEST, STAGES
from zerolora.config.values import HUB_ADAPTERS
from zerolora.data.prepared_rows import PROMPTS
from zerolora.errors import UserError
from zerolora.export.targets import TARGETS
from zerolora.files import MANIFEST, canonical, stamp

CONFIG_FILE = "config/config.yaml"
RESOLVED = "results/config.json"
GPU_RANK_CORES = 4
"""Cores for each rank on a GPU: one issues kernels, others run the backward pass, read rows, serve NCCL, and write
checkpoints."""
CPU_EVALUATION_CORES = 2
PLANNING = ("estimate", "render")
"""Stages that plan a run, by tables or with torch."""
# Files that a config can name: USER_CONFIG, PROBE, USER_TEMPLATE, USER_TASK, USER_TASK_JSON and HARNESS_FILES in
# config/values.py.
USER_FILES = (
    *("config/deepspeed/*.json", "config/hardware/*.json", "config/templates/*.jinja"),
    *("config/tasks/*.py", "config/tasks/*.json", "config/harness/**/*", "config/searches/*.json"),
    *("config/experiments/*.yaml", "config/kept/*.json"),
)


def user_files() -> list[str]:
    """Return the user's files that a config can name: DeepSpeed configs, measured hardware, prompt formats, evaluation
    tasks, experiments, and the trials of searches."""
    return sorted(str(path) for pattern in USER_FILES for path in Path().glob(pattern) if path.is_file())


class Jobs:
    """The config, resolved for every stage."""

    def __init__(self, check_files: bool = True, over: RunOverrides = file.NOTHING, prefix: str = "") -> None:
        """Read the config with its overrides and, with `check_files`, check the files that it names. A module's outputs
        are below its `prefix`.

        Raises UserError if the config or one of these files is invalid.
        """
        self.over, self.prefix = over, prefix
        self.config = file.load(Path(CONFIG_FILE), over=over)
        if check_files:
            file.check_files(Path(CONFIG_FILE), self.config, over)
            if "DVC_STAGE" in os.environ:
                check_runs(self.config)
        self.values = file.with_overrides(Path(CONFIG_FILE), over).values
        self.resolved = resolve(self.config)
        self.fingerprints = Fingerprints()
        self.codes = codes(self.resolved, self.fingerprints)
        self.shared = shared_settings(self.resolved.runs)
        self.compared = compared(self.resolved) | {"shared": self.shared}
        runs = self.resolved.runs
        self.first = {
            kind: {getattr(each, kind): name for name, each in reversed(runs.items()) if getattr(each, kind)}
            for kind in SHARED_STAGES._fields
        }
        """The first run that uses each shared output, by the output's kind and name."""
        self.first_of_data = {run.dataset: name for name, run in reversed(self.config.all_runs.items())}
        self.made = made_folders(self.config)
        self.resources: dict[tuple[Any, ...], tuple[list[Any], Any]] = {}
        """Resources of jobs, each with the states of the files that they were computed from."""

    @functools.cached_property
    def config_file(self) -> str:
        """The config; with overrides, a file in work/, named by its content."""
        return (
            f"{self.prefix}work/config/{hashlib.sha256(self.effective.encode()).hexdigest()}.yaml"
            if self.over.parts
            else CONFIG_FILE
        )

    @functools.cached_property
    def effective(self) -> str:
        """Text of the config with its overrides; its first line names them."""
        return f"{origin_line(self.over.about)}\n{yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)}"

    def check(self, remote: bool) -> None:
        """Raise UserError if the settings differ from those that a `remote` job was planned with or, inside `dvc
        repro`, from those that DVC compares."""
        if remote:
            check_planned(digest(*self.texts()))
        elif os.environ.get("DVC_STAGE", "resolve") != "resolve":
            check_resolved(*self.texts(), Path(RESOLVED), Path("results/settings"))

    def texts(self) -> tuple[str, dict[str, str]]:
        """Return the expected outputs of resolve."""
        return texts({name: self.compared[name] for name in self.compared if name != "shared"}, self.shared, self.codes)

    def of(self, wildcards: Any) -> "Job":
        """Return the job of the wildcards."""
        return Job(self, dict(wildcards.items()))

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """Values of each wildcard."""
        resolved = self.resolved
        return {
            "run": list(self.config.all_runs),
            **{kind: list(names) for kind, names in self.first.items()},
            "dataset": list(self.config.prepare),
            "model": list(resolved.fetch),
            "source": list(resolved.fetch_data),
            "packaged": list(resolved.fetch_package_data),
            "adapter": list(resolved.fetch_adapter),
            "task": list(resolved.tasks),
            "target": list(TARGETS),
            "sample": list(resolved.samples),
            "selection": list(resolved.selections),
            "questions": list(resolved.held_out),
        }

    def constraints(self) -> dict[str, str]:
        """Return a regular expression for each wildcard."""
        return {name: "|".join(values) or "none" for name, values in self.names.items()}

    def planned(self, outputs: Mapping[str, Any]) -> dict[str, "PlannedJob"]:
        """Return the jobs that the runs need, by stage and names, as in train@default. `outputs` has the outputs of
        each rule."""
        datasets = sorted(self.config.used_data)
        prepare, rows = self.config.prepare, self.config.tasks.rows
        paths = [path for name in datasets for path in prepare[name].reads] + [task.path for task in rows.values()]
        made = [each for path in paths for each in self.made_at(Path(path))]
        used = self.names | {
            "dataset": datasets,
            "model": sorted({prepare[name].model for name in datasets} | self.teachers),
            "source": sorted({each.names["source"] for each in made if each.stage == "fetch_data"}),
            "packaged": sorted({each.names["packaged"] for each in made if each.stage == "fetch_package_data"}),
        }
        result = {}
        for stage in outputs:
            patterns = [str(each).removeprefix(self.prefix) for each in outputs[stage]]
            kinds = re.findall(r"{(\w+)", patterns[0])
            of_stage = {
                "task_rows": {"task": list(self.resolved.task_rows)},
                "evaluate_base": {"dataset": sorted(self.first_of_data)},
                "task_base": {"dataset": sorted(self.first_of_data)},
            }
            values = [(used | of_stage.get(stage, {}))[kind] for kind in kinds]
            for names in itertools.product(*values):
                wildcards = dict(zip(kinds, names, strict=True))
                job = PlannedJob(self, stage, wildcards, [expand(path, **wildcards)[0] for path in patterns])
                result[job.name] = job
        return result

    @functools.cached_property
    def teachers(self) -> set[str]:
        """Names of the models that teach runs."""
        return {run.teacher.model for run in self.resolved.runs.values() if run.teacher}

    @functools.cached_property
    def codes_of_today(self) -> Codes:
        """Code fingerprints, whatever the user keeps."""
        return codes_of_today(self.resolved, self.fingerprints)

    def code_at(self, among: Codes, group: str, stage: str, name: str) -> str:
        """Return the code fingerprint of a stage at its place among those of all stages."""
        if group in ("runs", "shared"):
            return str(getattr(among, group)[name][stage])
        return str(among.named[stage][name] if name else among.named[stage])

    @functools.cached_property
    def hashes(self) -> Hashes:
        """Hashes of files."""
        return Hashes()

    @functools.cached_property
    def sources(self) -> str:
        """A hash of the files of which DVC makes `resolve` depend, as this run began."""
        return self.read_sources()

    def read_sources(self) -> str:
        """Return the same hash of the present files."""
        reads = STAGES["resolve"].reads
        files = [path for each in reads for path in ([each] if Path(each).is_file() else sorted(files_below(each)))]
        hashes = [[path, self.hashes.of(path)] for path in files]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def users_file(self, path: str) -> Any:
        """Return an input of the user, which is not below the prefix."""
        return local(path) if self.prefix else path

    def read_files(self) -> list[str]:
        """Return the user's files that stages read, whose dates Snakemake compares."""
        config = self.config
        sections = (config.prepare, config.tasks.rows, config.fetch.directory)
        paths = [str(each.path) for section in sections for each in section.values() if each.path]
        return [*user_files(), *(name for path in paths for name in self.files_at(Path(path)))]

    def files_at(self, path: Path) -> list[str]:
        """Return the data files of a path, without those that a stage makes, which their manifest represents."""
        made = self.made_at(path)
        if not path.is_dir() or any(path.is_relative_to(each.folder) for each in made):
            return [] if made else [str(path)]
        return sorted(
            str(each)
            for each in path.rglob("*")
            if each.is_file()
            and not any(part[0] == "." for part in each.relative_to(path).parts)
            and not any(each.is_relative_to(other.folder) for other in made)
        )

    def made_at(self, path: Path) -> list[MadeFolder]:
        """Return the directories that stages make and that contain a path, or are in it."""
        return [each for each in self.made if each.concerns(path)]


@dataclass(frozen=True)
class PlannedJob:
    """A job that the runs need."""

    jobs: Jobs
    stage: str
    wildcards: dict[str, str]
    outputs: list[str]

    @property
    def name(self) -> str:
        """Its stage in DVC, as in train@default."""
        names = "-".join(self.wildcards.values())
        return f"{self.stage}@{names}" if names else self.stage

    @property
    def code_place(self) -> str:
        """Where config/kept/codes.json has its code fingerprint."""
        _, stage, name = Job(self.jobs, self.wildcards).code_place(self.stage)
        return f"{stage}@{name}"

    @property
    def code_of_today(self) -> str:
        """Its code fingerprint, whatever the user keeps."""
        return self.jobs.code_at(self.jobs.codes_of_today, *Job(self.jobs, self.wildcards).code_place(self.stage))

    @property
    def runs(self) -> set[str]:
        """The runs that use its outputs."""
        return {name for name in self.jobs.config.all_runs if self._is_used_by(name)}

    def _is_used_by(self, run: str) -> bool:
        dataset = self.jobs.config.all_runs[run].dataset
        names = {
            "run": run,
            "dataset": dataset,
            "model": self.jobs.config.prepare[dataset].model,
            **{kind: str(getattr(self.jobs.resolved.runs[run], kind)) for kind in SHARED_STAGES._fields},
        }
        teacher = self.jobs.resolved.runs[run].teacher
        if teacher and self.wildcards == {"model": teacher.model}:
            return True
        return all(names.get(kind, value) == value for kind, value in self.wildcards.items())

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the settings, as dvc.yaml's params name them; None without one."""
        value: Any = self.jobs.compared
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @functools.cached_property
    def params(self) -> dict[str, str]:
        """The params of its rule that are settings, code or files of the user; others are paths."""
        job = Job(self.jobs, self.wildcards)
        if self.stage == "resolve":
            return {"values": job.config_values, "code": job.named_codes, "sources": job.sources}
        return {"settings": job.settings(self.stage), "code": job.code(self.stage)}


class Job:
    """One job, by the wildcards of its outputs."""

    def __init__(self, jobs: Jobs, wildcards: dict[str, str]) -> None:
        """`wildcards` name a run, a shared output, a data set, a model, or a fetched source."""
        self._jobs, self._wildcards = jobs, wildcards

    # Settings and code.

    def settings(self, stage: str) -> str:
        """Settings of a stage as canonical JSON, or as a file named by its content, so that only values are compared,
        without keys at their neutral value (config/compared.py)."""
        if stage == "export_target":  # without the settings of other targets
            return argument_of(compared(getattr(self._run.export, self._wildcards["target"])))
        settings: Any = self._jobs.compared
        for key in ALL_STAGES[stage].settings.split("."):
            settings = settings[key.format(**self._wildcards)]
        return argument_of(settings)

    def code(self, stage: str) -> str:
        """Code fingerprint of a stage under its settings (config/code.py), which DVC compares too."""
        jobs = self._jobs
        if stage in ON_REQUEST:
            target = {"export.targets": {*self._wildcards.get("target", "").split()}}
            return jobs.fingerprints.of(stage, {**chosen_by_run(self._run, stage), **target})
        return jobs.code_at(jobs.codes, *self.code_place(stage))

    def code_place(self, stage: str) -> tuple[str, str, str]:
        """Return where the code fingerprint of a stage is: its group, its stage and its name."""
        group, _, rest = ALL_STAGES[stage].settings.partition(".")
        return group, stage, rest.partition(".")[0].format(**self._wildcards)

    # Names.

    @functools.cached_property
    def run(self) -> str:
        """Its run, or the first of the runs that share its output."""
        if "run" in self._wildcards:
            return self._wildcards["run"]
        for kind, runs in self._jobs.first.items():
            if kind in self._wildcards:
                return runs[self._wildcards[kind]]
        every = self._jobs.config.all_runs
        if self._sample and self._sample.of.run:
            return self._sample.of.run
        return self._jobs.first_of_data.get(self._asked_data, next(iter(every)))

    @property
    def _run(self) -> RunSettings:
        return self._jobs.resolved.runs[self.run]

    @property
    def dataset(self) -> str:
        """Its data set, that of its sample or selection, or that of its run."""
        return self._asked_data or self._jobs.config.all_runs[self.run].dataset

    @property
    def _sample(self) -> Sample | None:
        """Its sample, or that of its selection."""
        return self._jobs.config.samples[self._sample_name] if self._sample_name else None

    @property
    def _sample_name(self) -> str:
        selection = self._wildcards.get("selection")
        return self._wildcards.get("sample") or (self._jobs.config.selections[selection].samples if selection else "")

    @property
    def _asked_data(self) -> str:
        """The data set that its wildcards name; empty if they name none."""
        return self._wildcards.get("dataset") or (
            self._jobs.config.prompts_of(self._sample_name) if self._sample_name else ""
        )

    @property
    def _model_name(self) -> str:
        return self._wildcards.get("model") or self._jobs.config.prepare[self.dataset].model

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Its wildcards, and the names of its run, data set, model and shared outputs."""
        shared = {kind: str(getattr(self._run, kind)) for kind in SHARED_STAGES._fields}
        models = {"model": self._model_name, "teacher": self._run.teacher.model if self._run.teacher else ""}
        names = {"run": self.run, "dataset": self.dataset, **models, **shared, **self._wildcards}
        if self._sample:  # whose model may be of no run
            names |= {"sample": self._sample_name, "run": self._sample.of.run or ""}
        if "questions" in self._wildcards:
            source = self._jobs.resolved.held_out[self._wildcards["questions"]]
            names |= {"dataset": source.dataset or "", "task": source.task or ""}
        return names

    def names_option(self, stage: str) -> str:
        """Options of `zerolora stage` with the names in the paths of a stage's files, and the prefix of a module."""
        names = ",".join(f"{name}={self.names[name]}" for name in sorted(ALL_STAGES[stage].names))
        options = (("--names", names), ("--prefix", self._jobs.prefix))
        return " ".join(f"{option} {value}" for option, value in options if value)

    # Inputs.

    @property
    def source_files(self) -> list[str]:
        """Files of a model in a user's directory; the config pins other models."""
        model = self._jobs.config.fetch.directory.get(self._model_name)
        if not model:
            return []
        files = sorted(str(each) for each in Path(model.path).glob("*") if each.is_file() and each.name[0] != ".")
        return [self._jobs.users_file(each) for each in files]

    @property
    def _rows(self) -> list[Path]:
        """Paths of the rows of its task or data set; none for a task of lm-evaluation-harness."""
        if "task" not in self._wildcards:
            return [Path(path) for path in self._jobs.config.prepare[self.dataset].reads]
        rows = self._jobs.config.tasks.rows.get(self._wildcards["task"])
        return [Path(rows.path)] if rows else []

    @property
    def data_files(self) -> list[str]:
        """The user's data files."""
        return [self._jobs.users_file(each) for path in self._rows for each in self._jobs.files_at(path)]

    @property
    def made_data(self) -> list[str]:
        """Manifests of data that stages make: downloads, selections, and other data sets."""
        return [str(each.manifest) for path in self._rows for each in self._jobs.made_at(path)]

    @property
    def task_rows(self) -> list[str]:
        """File of a task's rows; tasks of lm-evaluation-harness have none."""
        return [f"results/tasks/{self._wildcards['task']}.jsonl"] if self._rows else []

    @property
    def evaluated(self) -> list[str]:
        """What its questions are of: a data set's manifest, or a task's rows; the harness has those of its own."""
        data, task = (self.names[kind] for kind in ("dataset", "task"))
        files = {f"results/data/{data}/{MANIFEST}": data, f"results/tasks/{task}.jsonl": task}
        return [path for path, name in files.items() if name]

    @property
    def validation_tasks(self) -> list[str]:
        """Files of the rows of the tasks at the validations of its run."""
        return [f"results/tasks/{task.name}.jsonl" for task in self._run.train.validation_tasks]

    @property
    def start_files(self) -> list[str]:
        """The adapter that its run starts from: its manifest, or all files of a user's adapter."""
        return self._adapter_files(self._run.train.from_adapter)

    @property
    def compared_files(self) -> list[str]:
        """The same of the adapter of its reference."""
        return self._adapter_files(self._run.reference.from_adapter if self._run.reference else None)

    def _adapter_files(self, start: str | None) -> list[str]:
        if start is None:
            return []
        if Path(start).is_relative_to("results") or Path(start).is_relative_to(HUB_ADAPTERS):
            return [str(Path(start) / MANIFEST)]
        files = sorted(str(each) for each in Path(start).rglob("*") if each.is_file())
        return [self._jobs.users_file(each) for each in files]

    @property
    def reference_files(self) -> list[str]:
        """Manifest of what its run's objective compares with, if it does: its reference, or its teacher's
        probabilities."""
        reference = [f"results/{self._run.referenced}/reference/{MANIFEST}"] if self._run.referenced else []
        return reference + ([f"results/{self._run.taught}/teacher/{MANIFEST}"] if self._run.taught else [])

    @property
    def teacher_files(self) -> list[str]:
        """Manifests of its run's teacher: of the model, and of its adapter."""
        teacher = self._run.teacher
        assert teacher, "no run with these probabilities has a teacher"
        model = f"resources/models/{teacher.model}/{MANIFEST}"
        return [model, str(Path(teacher.adapter) / MANIFEST)] if teacher.adapter else [model]

    @property
    def fetched_start(self) -> list[Any]:
        """Manifest of the hub adapter that its run starts from, which render checks. Its date is ignored: render's
        outputs do not depend on it, and it is no dependency in DVC."""
        start = self._run.train.from_adapter
        return [ancient(f"{start}/{MANIFEST}")] if start and Path(start).is_relative_to(HUB_ADAPTERS) else []

    @property
    def sampled_model(self) -> list[str]:
        """Manifests of the adapter and of the merged weights that its sample is of; none without a run."""
        of = self.names["run"]
        return [f"results/{of}/adapter/{MANIFEST}", f"results/{of}/merged/{MANIFEST}"] if of else []

    @property
    def renders(self) -> set[str]:
        """Names of the outputs of `render` of all runs on its data, or with its reference."""
        kind = next((each for each in ("referenced", "taught") if each in self._wildcards), "dataset")
        runs = self._jobs.resolved.runs.values()
        return {run.rendered for run in runs if getattr(run, kind) == self._wildcards[kind]}

    @property
    def task_files(self) -> list[str]:
        """Metrics and answers of both models in the further tasks."""
        return [
            f"{folder}/tasks/{task}{suffix}.json"
            for folder in (f"results/base/{self.dataset}", f"results/{self.run}")
            for task in self._run.report.tasks
            for suffix in ("", ".answers")
        ]

    @property
    def questions(self) -> Any:
        """File of the judge's questions."""
        return self._jobs.users_file(str(self._jobs.resolved.judge.questions))

    @property
    def exported(self) -> list[str]:
        """Manifests of all runs' `export.targets`. Raises WorkflowError if there are none."""
        runs = self._jobs.resolved.runs
        manifests = [f"results/{name}/export/{each}/{MANIFEST}" for name in runs for each in runs[name].export.targets]
        if not manifests:
            raise WorkflowError(
                f"{CONFIG_FILE}: export.targets is empty, so there is nothing to export; set export: {{targets: "
                f"[gguf]}}, or some of {', '.join(TARGETS)}"
            )
        return manifests

    # Options.

    @property
    def config_file(self) -> str:
        """The config; with overrides, the file that the run writes of both."""
        return self._jobs.config_file

    @property
    def config_values(self) -> str:
        """Values of the config."""
        return canonical(self._jobs.values)

    @property
    def sources(self) -> str:
        """A hash of the source code and of the user's files."""
        return self._jobs.sources

    @property
    def named_codes(self) -> str:
        """Code fingerprints in results/config.json."""
        return canonical(self._jobs.codes.named)

    @property
    def _evaluate(self) -> Any:
        return self._jobs.resolved.evaluate[self.dataset]

    @property
    def _is_opened_by_vllm(self) -> bool:
        """Whether vLLM opens the target: the target supports vLLM, and the config evaluates with it."""
        return self._evaluate.engine == "vllm" and TARGETS[self._wildcards["target"]].for_vllm

    @property
    def export_options(self) -> str:
        """vLLM's interpreter and device, for targets that vLLM opens."""
        if not self._is_opened_by_vllm:
            return ""
        python = self._evaluate.vllm_python or "python"
        return f"--vllm-python {shlex.quote(python)} --device {self.export_device}"

    @property
    def restore_sampled_model(self) -> str:
        """The commands before `sample` that ensure that the weights of its model are on this machine."""
        assert self._sample, "the job of a sample"
        if self._sample.of.served:
            return ""
        below, run, device = self._jobs.prefix, self.names["run"], self.device
        weights = f"{below}resources/weights/{self._model_name}"
        commands = [
            f"zerolora weights --model {below}resources/models/{self._model_name} --weights {weights} --device {device}"
        ]
        if run:
            trained_on = f"{below}results/data/{self._jobs.config.all_runs[run].dataset}"
            commands.append(
                f"zerolora merged-weights --weights {weights}.json --adapter {below}results/{run}/adapter"
                f" --data {trained_on} --manifest {below}results/{run}/merged/{MANIFEST}"
            )
        return "".join(f"{command} && " for command in commands)

    # Resources.

    @property
    def device(self) -> str:
        """Device of its model: that of the run, or of the first run of its data set; of a sample its own."""
        if self._sample:
            return self._jobs.resolved.samples[self._sample_name].device
        return (self._run.evaluate if "run" in self._wildcards else self._evaluate).device

    @property
    def training_device(self) -> str:
        """Device of its run."""
        return self._run.train.device

    @property
    def export_device(self) -> str:
        """Device that opens a target: the CPU, except for vLLM."""
        return self.device if self._is_opened_by_vllm else "cpu"

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self._run.train.ranks_per_node

    @property
    def training_cores(self) -> int:
        """Cores of each node for training: one for each rank on a CPU, which has one thread."""
        return self._gpu_cores(self.ranks) if self.device == "cuda" else self.ranks

    @property
    def evaluation_cores(self) -> int:
        """Cores for a stage in which a model answers."""
        ranks = self._jobs.resolved.samples[self._sample_name].ranks if self._sample else self._evaluate.ranks
        return self._gpu_cores(ranks) if self.device == "cuda" else CPU_EVALUATION_CORES

    def _gpu_cores(self, ranks: int) -> int:
        """Return the cores for ranks on GPUs: GPU_RANK_CORES each, but not more than a machine has, as far as known."""
        wanted = GPU_RANK_CORES * ranks
        machine = (self._run.render.hardware.probe or {}).get("hardware")
        counted = machine.get("cores") if isinstance(machine, dict) else None
        return max(ranks, min(wanted, counted)) if isinstance(counted, int) else wanted

    @property
    def nodes(self) -> int:
        """Nodes for training."""
        return self._run.train.nodes

    @property
    def keep_checkpoints(self) -> int:
        """Checkpoints that training keeps."""
        return self._run.estimate.keep_checkpoints

    def requested(self, stage: str, what: str, threads: int, attempt: int) -> Any:
        """Return a stage's request: `minutes`; `mem_mib` of a node; `gpus` of a node; `gres` and `lsf`, the same in
        Slurm's and LSF's syntax; `all_gpus` of all nodes, as Snakemake counts them.

        Minutes and memory grow with each attempt, except for training, which resumes and whose memory is predicted
        best. Memory is limited to that of a machine. Slurm treats megabytes as MiB.
        """
        resource = {"gres": "gpus", "lsf": "gpus", "all_gpus": "gpus"}.get(what, what)
        if stage == "train" and resource == "gpus":
            number: int = self.ranks if self.device == "cuda" else 0
        else:
            try:
                number = self._resources(stage, threads)[resource]
            except UserError:
                # The files that it depends on are missing; once the job can run, Snakemake calls this again.
                return undetermined()
        if what == "gres":
            return f"gpu:{number}" if number else ""
        if what == "lsf":
            return f"-gpu num={number}:j_exclusive=yes" if number else ""
        if what == "all_gpus":
            return number * (self.nodes if stage == "train" else 1)
        if what == "gpus":
            return number
        number *= 1 if stage == "train" else attempt
        return min(number, self._run.estimate.host_memory // 1024**2) if what == "mem_mib" else number

    def _resources(self, stage: str, threads: int) -> Any:
        """Return the resources of a stage. Snakemake asks for each of them by itself, a dozen times for a run; they are
        computed again only if a file that they depend on is another."""
        if stage == "prepare":  # which depends on the user's files
            return self._computed_resources(stage, threads)
        key = stage, threads, *sorted(self._wildcards.items())
        state = [stamp(path) for path in self._read_for_resources()]
        before, known = self._jobs.resources.get(key, ([], None))
        if state != before:
            known = self._computed_resources(stage, threads)
            self._jobs.resources[key] = state, known
        return known

    def _read_for_resources(self) -> list[Path]:
        """Return the files that resources depend on, beside the settings."""
        below, run = Path(self._jobs.prefix), self._run
        model, data = below / f"resources/models/{self._model_name}", below / f"results/data/{self.dataset}"
        of_run = [below / f"results/{run.rendered}/render.json", below / f"results/{self.run}/adapter" / MANIFEST]
        if run.teacher:
            of_run += [below / f"resources/models/{run.teacher.model}" / name for name in (MANIFEST, "config.json")]
        of_data = [data / MANIFEST, data / "stats.json", data / f"{PROMPTS}.arrow"]
        return [model / MANIFEST, model / "config.json", *of_data, *of_run]

    def _compared_resources(self, stage: str, model: Path, data: Path, gpus: int) -> Any:
        """Return the resources of a stage that computes what its run's objective compares with."""
        from zerolora.planner import slurm_resources

        run = self._run
        if stage == "reference":
            assert run.reference, "no run on these rows has a reference"
            return slurm_resources.referring(run.reference, model, data, run.render, gpus)
        assert run.teacher, "no run on these rows has a teacher"
        teacher = model.with_name(run.teacher.model)
        return slurm_resources.teaching(run.teacher, teacher, data, run.render, gpus)

    def _computed_resources(self, stage: str, threads: int) -> Any:
        # Importing the memory model takes longer than reading the config, so only jobs that request memory do it.
        from zerolora.data.sampled_prompts import size_of
        from zerolora.planner import slurm_resources

        below = Path(self._jobs.prefix)
        model, data = below / f"resources/models/{self._model_name}", below / f"results/data/{self.dataset}"
        gpus = run_sections(self._jobs.config, self.run).hardware.gpus_per_node
        if stage == "export_target":  # vLLM answers with the exported model, on the run's device
            stage = "evaluate" if self._is_opened_by_vllm else "merge"
        match ALL_STAGES[stage].requests or stage:
            case "prepare":
                read = map(Path, self._jobs.config.prepare[self.dataset].reads_rows)
                rows = [below / path if self._jobs.made_at(path) else path for path in read]
                result: Any = slurm_resources.preparing(rows, threads)
            case "reference" | "teacher" as compared:
                result = self._compared_resources(compared, model, data, gpus)
            case "train":
                result = slurm_resources.rendered(below / f"results/{self._run.rendered}/render.json")
            case "evaluate":
                models = 2 if "run" in self._wildcards and self._run.evaluate.unmerged else 1
                result = slurm_resources.evaluating(self._evaluate, model, data, self._run.render, gpus, models)
            case "sample":
                settings = self._jobs.resolved.samples[self._wildcards["sample"]]
                result = slurm_resources.sampling(settings, model, *size_of(data), self._run.render, gpus)
            case "merge":
                result = slurm_resources.merging(model, below / f"results/{self.run}/adapter")
            case _:
                result = slurm_resources.planning() if stage in PLANNING else slurm_resources.reporting()
        return result
