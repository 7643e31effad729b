"""Checks over the sections of one run; a section checks itself (`faults` in its class)."""

from collections.abc import Iterable

from pydantic import ValidationError

from zerolora.config.grid_rules import location_of
from zerolora.config.method_sections import DEFAULT_INIT, Quantization
from zerolora.config.mistakes import located
from zerolora.config.objective_sections import ObjectiveSection
from zerolora.config.resolve import (
    device_precision,
    models_on_load,
    peak_learning_rate,
    run_sections,
    stages_of,
    user_config,
    with_overrides,
)
from zerolora.config.run_objectives import holds_out
from zerolora.config.schema import Config, Hardware, Prepare, RunSections, Train
from zerolora.config.section import Fault
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError, shown
from zerolora.evaluate.tasks import TASKS
from zerolora.export.targets import TARGETS
from zerolora.methods.registry import TRAINABLE
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.hardware import GPUS, NETWORKS, NODE_LINKS, offered
from zerolora.planner.run_hardware import hardware_of, target_of
from zerolora.planner.user_config import check_user_config, layout_of
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES


def impossible_run(config: Config, run: str) -> Iterable[Fault]:
    """Yield (location, message) for each mistake in the sections of a run."""
    try:
        settings = run_sections(config, run)
    except ValidationError as error:
        for mistake in located(error, with_overrides(config, run)):
            yield location_of(config, run, *mistake.location), mistake.text()
        return
    for (section, key, *inner), text in _faults(config, run, settings):
        own = key in getattr(config.all_runs[run], section)
        yield (*(location_of(config, run, section, key) if own else (section, key)), *inner), text


def _faults(config: Config, run: str, settings: RunSections) -> Iterable[Fault]:
    """Yield (path below the run's sections, message), in the order of the messages."""
    train, data = settings.train, config.prepare.get(config.all_runs[run].dataset)
    yield from too_many_ranks(settings.hardware, train)
    yield from indivisible_batch(settings.hardware, train)
    yield from _of_train(train.faults_of_attention())
    yield from loss_of_whole_rows(train)
    yield from _of_train(train.faults_of_offload())
    yield from _of_train(train.faults_of_validation())
    validates = data is None or holds_out(config, config.all_runs[run].dataset, "validation")
    yield from validation_without_rows(train, validates)
    yield from impossible_validation_tasks(config, train, validates)
    yield from impossible_kernels(settings.hardware, train)
    yield from impossible_compile(train)
    yield from weights_of_another_engine(settings.render.strategy, train)
    yield from init_of_a_continued_run(train)
    yield from unused_quantization(train)
    yield from _of_train(TRAINABLE[train.method].faults(train))
    yield from unquantized_on_load(config, train, data)
    yield from untrained_tokens(train, data)
    yield from noise_with_a_reference(train)
    if isinstance(section := getattr(train, train.objective, None), ObjectiveSection):
        yield from _of_train(((train.objective, *key), text) for key, text in section.faults())
    yield from unquantized_base(settings)
    yield from targets_without_a_merged_model(settings)
    yield from impossible_strategy(config, run, settings)
    yield from _of_train(OPTIMIZERS[train.optimizer].faults(train.betas, train.epsilon))
    yield from _of_train(train.faults_of_learning_rate())
    yield from _of_train(train.faults_of_schedule(peak_learning_rate(train)))
    yield from impossible_precision(settings.hardware, train)


def _of_train(faults: Iterable[Fault]) -> Iterable[Fault]:
    for key, text in faults:
        yield ("train", *key), text


def too_many_ranks(hardware: Hardware, train: Train) -> Iterable[Fault]:
    """Yield more ranks or nodes than the machines have."""
    if hardware.device == "cuda" and train.ranks_per_node > (gpus := hardware.gpus_per_node):
        text = f"{train.ranks_per_node} ranks on a node of {gpus} GPUs (hardware.gpus_per_node); use {gpus} or less"
        yield ("train", "ranks_per_node"), text
    if train.nodes > hardware.nodes:
        text = f"{train.nodes} nodes of {hardware.nodes} (hardware.nodes); use {hardware.nodes} or less"
        yield ("train", "nodes"), text


def indivisible_batch(hardware: Hardware, train: Train) -> Iterable[Fault]:
    """Yield ranks that cannot be grouped to share rows, and a global batch that cannot be divided among the groups."""
    if train.nodes > hardware.nodes:  # reported; the number of ranks is wrong
        return
    ranks, shared = train.nodes * train.ranks_per_node, train.sequence_parallel
    if ranks % shared:
        divisors = " or ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
        text = f"{ranks} ranks are not a multiple of {shared}; use {divisors}"
        yield ("train", "sequence_parallel"), text
        return
    data_ranks = ranks // shared
    groups = f"{ranks} ranks" if shared == 1 else f"{data_ranks} groups of {shared} ranks (sequence_parallel)"
    if train.micro_batch == "auto":
        least, factors = data_ranks, groups
    else:
        least, factors = train.micro_batch * data_ranks, f"micro_batch {train.micro_batch} x {groups}"
    if train.global_batch % least:
        text = f"{train.global_batch} is not a multiple of {factors}; use a multiple of {least}"
        yield ("train", "global_batch"), text


def loss_of_whole_rows(train: Train) -> Iterable[Fault]:
    """Yield ranks that share rows, with an objective whose loss is not a sum over tokens."""
    shared = train.sequence_parallel
    if shared > 1 and not OBJECTIVES[train.objective].of(train).by_token:
        text = f"{shared} with objective {train.objective}, whose loss needs whole rows; set sequence_parallel: 1"
        yield ("train", "sequence_parallel"), text


def validation_without_rows(train: Train, validates: bool) -> Iterable[Fault]:
    """Yield validation on a data set without validation rows, unless it `validates`."""
    if train.validation_steps and not validates:
        text = f"{train.validation_steps}, but the data set has no validation rows; set its split.validation"
        yield ("train", "validation_steps"), f"{text}, or remove it"


def impossible_validation_tasks(config: Config, train: Train, validates: bool) -> Iterable[Fault]:
    """Yield validation tasks that are unknown, or that cannot run during training."""
    rows, key = config.tasks.rows, ("train", "validation_tasks")
    asked = [name for name, task in rows.items() if task.check not in TASKS or TASKS[task.check].ask != "loss"]
    remedy = f"choose from {', '.join(asked)}" if asked else "add a task with check: multiple_choice there"
    for name in train.validation_tasks:
        if train.validation_tasks.count(name) > 1:
            yield key, f"{name} occurs twice; list it once"
            return
        if name in config.tasks.harness:
            yield key, f"{name} is a task of lm-evaluation-harness, which runs only after training; {remedy}"
        elif name not in rows:
            yield key, f"{name} is not in tasks.rows; {remedy}"
        elif name not in asked:
            text = f"{name} has check {rows[name].check}, which asks for no answer"
            yield key, f"{text}; choose another check there, or remove it here"
        elif train.sequence_parallel > 1 and rows[name].check != "multiple_choice":
            text = f"{name} has check {rows[name].check}, whose answers are generated on whole rows"
            yield key, f"{text}; set sequence_parallel: 1, or remove it here"
        elif name in ("loss", *OBJECTIVES[train.objective].of(train).metrics):
            yield key, f"{name}_validation is a column of loss.csv already; give the task another name"
    if train.validation_tasks and not validates:
        yield key, "the data set has no validation rows; set its split.validation, or remove the tasks"


def impossible_kernels(hardware: Hardware, train: Train) -> Iterable[Fault]:
    """Yield liger-kernel on a device without Triton, or on operations that torch compiles."""
    if train.kernels != "liger":
        return
    if hardware.device == "cpu":
        text = "liger with device cpu, for which Triton compiles no kernels; use auto or off"
        yield ("train", "kernels"), text
    elif train.compile:
        text = "liger with compile: true, which compiles the same operations"
        yield ("train", "kernels"), f"{text}; use auto or off, or compile: false"


def impossible_compile(train: Train) -> Iterable[Fault]:
    """Yield compiled layers that are quantized."""
    method = TRAINABLE[train.method]
    if train.compile and method.quantizes():
        sections = [name for name in method.sections if name != "quantization"]
        others = " or ".join(name for name, each in TRAINABLE.items() if [*each.sections] == sections)
        text = f"true with method {train.method}, whose quantized layers are not compiled"
        yield ("train", "compile"), f"{text}; set it to false, or method: {others}"


def weights_of_another_engine(strategy: str, train: Train) -> Iterable[Fault]:
    """Yield rounded weights under a strategy that may be DeepSpeed's, which keeps fp32 weights of its own."""
    if train.weights != "fp32" and (strategy not in STRATEGIES or STRATEGIES[strategy].engine == "deepspeed"):
        text = f"{train.weights} with render.strategy {strategy}, where DeepSpeed may keep fp32 weights"
        yield ("train", "weights"), f"{text}; use fp32, or strategy ddp or fsdp"


def init_of_a_continued_run(train: Train) -> Iterable[Fault]:
    """Yield an initialization of factors that are those of another adapter."""
    if train.lora.init != DEFAULT_INIT and train.from_adapter and "lora" in TRAINABLE[train.method].sections:
        text = f"{train.lora.init}, but the factors start as those of {train.from_adapter}; use {DEFAULT_INIT}"
        yield ("train", "lora", "init"), text


def unused_quantization(train: Train) -> Iterable[Fault]:
    """Yield a key of `quantization` for a method that does not quantize the base model."""
    default = Quantization()
    if train.quantization == default or TRAINABLE[train.method].quantizes():
        return
    key, value = next((key, value) for key, value in train.quantization if value != getattr(default, key))
    text = f"{value} with method {train.method}, which quantizes nothing; set method: {_quantizing()}, or remove it"
    yield ("train", "quantization", key), text


def unquantized_on_load(config: Config, train: Train, data: Prepare | None) -> Iterable[Fault]:
    """Yield a method that does not quantize a base whose weights are dequantized whenever they are loaded: each rank
    would hold its own copy, where the estimate counts pages of a file in bf16 that ranks share."""
    for source, model in models_on_load(config).items():
        if data and data.model == model and not TRAINABLE[train.method].quantizes():
            text = f"{train.method}, but {source}.dequantize is on_load, which is for methods that quantize the base"
            yield ("train", "method"), f"{text}; use {_quantizing()}, or set it to on_fetch"


def _quantizing() -> str:
    return " or ".join(name for name, method in TRAINABLE.items() if method.quantizes())


def untrained_tokens(train: Train, data: Prepare | None) -> Iterable[Fault]:
    """Yield a method that cannot train the tokens that the data adds."""
    if data and (data.add_special_tokens or data.add_tokens) and not TRAINABLE[train.method].trains_rows:
        *others, last = [name for name, method in TRAINABLE.items() if method.trains_rows]
        text = f"{train.method}, which trains no rows of an embedding, but the data set adds tokens"
        yield ("train", "method"), f"{text} (add_special_tokens, add_tokens); use {', '.join(others)} or {last}"


def noise_with_a_reference(train: Train) -> Iterable[Fault]:
    """Yield dropout and noise in a model that is compared with one without them."""
    if not OBJECTIVES[train.objective].reference:
        return
    noise = "would be compared with a reference that nothing is drawn for"
    sections = TRAINABLE[train.method].sections
    values: dict[tuple[str, ...], float] = {
        **{(section, "dropout"): getattr(getattr(train, section), "dropout", 0.0) for section in sections},
        ("neftune_alpha",): train.neftune_alpha,
    }
    for path, value in values.items():
        if value:
            text = f"{value} with objective {train.objective}, whose answers {noise}; use 0.0"
            yield ("train", *path), text


def unquantized_base(settings: RunSections) -> Iterable[Fault]:
    """Yield a merge into the quantized weights of a method that quantizes none."""
    method = settings.train.method
    if settings.merge.base == "dequantized" and not TRAINABLE[method].quantizes():
        text = f"dequantized with method {method}, which quantizes nothing"
        yield ("merge", "base"), f"{text}; use original, or method: {_quantizing()}"


def targets_without_a_merged_model(settings: RunSections) -> Iterable[Fault]:
    """Yield export targets that are made from the merged model, if there is none."""
    if settings.merge.enabled:
        return
    if of_merged := [name for name in settings.export.targets if TARGETS[name].of_merged]:
        others = ", ".join(name for name, target in TARGETS.items() if not target.of_merged)
        text = f"{of_merged[0]} is made from the merged model, but merge.enabled is false; set merge.enabled: true"
        yield ("export", "targets"), f"{text}, or choose targets from {others}"


def impossible_strategy(config: Config, run: str, settings: RunSections) -> Iterable[Fault]:
    """Yield hardware that is unknown, a strategy that the hardware does not support, or an optimizer that the strategy
    does not."""
    try:
        user_config(settings.render.strategy)
    except UserError as error:
        yield ("render", "strategy"), str(error)
        return
    try:
        rendered = stages_of(config, run).render
    except UserError as error:
        if settings.hardware.probe:  # a check's files are reported by cross_checks.py
            yield ("hardware", "probe"), str(error)
        return
    if unknown := list(unknown_hardware(settings.hardware)):
        yield unknown[0]
        return
    try:
        hardware_of(rendered)
    except UserError as error:
        yield ("hardware", "probe" if rendered.hardware.probe else "gpu"), str(error)
    yield from strategy_without_support(rendered, settings.train)


def unknown_hardware(hardware: Hardware) -> Iterable[Fault]:
    """Yield names of hardware that the planner has no figures for."""
    for key, table in (("gpu", GPUS), ("node_link", NODE_LINKS), ("network", NETWORKS)):
        value = getattr(hardware, key)
        if value is not None and value not in table:
            yield ("hardware", key), f"{shown(value)} is not known; use one of {', '.join(offered(table))}"


def strategy_without_support(rendered: RenderSettings, train: Train) -> Iterable[Fault]:
    """Yield conflicts of the strategy, or of the user's DeepSpeed config, with hardware and optimizer."""
    name, target = rendered.strategy, target_of(rendered)
    layouts = list(STRATEGIES.values())
    try:
        if rendered.user_config is not None:
            check_user_config(name, rendered.user_config, target)
            layouts = [layout_of(rendered.user_config).strategy]
        elif name != "auto":
            STRATEGIES[name].check(target)
            layouts = [STRATEGIES[name]]
    except UserError as error:
        for line in str(error).splitlines():
            text = line.removeprefix("render.strategy: ").removeprefix("render.strategy is ")
            yield ("render", "strategy"), text
        return
    conflicts = [OPTIMIZERS[train.optimizer].conflict(layout, target) for layout in layouts]
    if all(conflicts) and (first := conflicts[0]):  # auto skips conflicting strategies
        yield ("train", "optimizer"), f"{train.optimizer}, and {first.problem}; {first.remedy}"


def impossible_precision(hardware: Hardware, train: Train) -> Iterable[Fault]:
    """Yield a precision that the device does not have."""
    precision = train.precision
    if hardware.device == "cpu" and precision == "fp16":
        text = "fp16 with device cpu, which DeepSpeed refuses; use auto, fp32 or bf16"
        yield ("train", "precision"), text
    if hardware.device == "cuda" and precision == "bf16" and device_precision(hardware) != "bf16":
        text = f"bf16 on a GPU of compute capability {hardware.compute_capability}, which has none; use auto or fp16"
        yield ("train", "precision"), text
