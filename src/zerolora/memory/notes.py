"""Notes on an estimate: assumptions about models beyond a decoder of equal layers, and parts that are not counted."""

from collections import defaultdict
from collections.abc import Iterator

from zerolora.memory.layer_trace import fault_of_tracing
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec

TOWERS = {"image encoder": ("vision", "visual", "image"), "audio encoder": ("audio", "speech")}
"""Parts of module paths, by kind of tower."""


def notes(model: ModelSpec, spec: TrainingSpec) -> list[str]:
    """Return a sentence for each assumption about a model under a training spec."""
    return [*_layers(model), *_experts(model, spec), *_towers(model), *_weights(model, spec)]


def _layers(model: ModelSpec) -> Iterator[str]:
    if fault := fault_of_tracing(model):
        yield f"activations: as those of a decoder of these sizes, for its class cannot be traced: {fault}"
    elif model.config:
        yield (
            "activations: traced from the model's class, with the operations of torch; kernels of other packages, such "
            "as mamba_ssm or flash-linear-attention, need less"
        )


def _experts(model: ModelSpec, spec: TrainingSpec) -> Iterator[str]:
    if not model.experts or (model.config and not fault_of_tracing(model)):
        return
    yield (
        "experts: computed by one grouped product, whose memory does not depend on the routing; "
        "the router's auxiliary loss is not counted"
    )
    experts = [module for module in model.modules if module.kind == "experts"]
    parameters = {f"{module.path}.{name}" for module in experts for name, _ in module.weights}
    if any(path in parameters for path, _ in spec.parameters(model).ranks):
        yield "experts: an adapter makes a copy of all experts' weights of a layer, kept for the backward pass"
    if spec.method.unpacks_experts:
        yield "experts: in 4 bits, and unpacked while their layer computes; the router is not quantized"
    elif spec.method.frozen_type and parameters:
        yield "experts: not quantized in 8 bits; nor is the router"


def _towers(model: ModelSpec) -> Iterator[str]:
    sizes: dict[str, int] = defaultdict(int)
    for module in model.modules:
        path = module.path.lower()
        tower = next((tower for tower, names in TOWERS.items() if any(name in path for name in names)), None)
        if tower:
            sizes[tower] += module.parameters * module.count
    for tower, count in sizes.items():
        yield f"{tower}: {count:,} parameters counted, no {tower.partition(' ')[0]} rows and no activations of it"


def _weights(model: ModelSpec, spec: TrainingSpec) -> Iterator[str]:
    if model.stored_as:
        yield f"weights: stored as {model.stored_as}, counted in the run's precision"
    if spec.method.reads_whole and spec.layout.stage == 3:
        yield "loading: each rank reads the quantized base model whole before it keeps its shard"


def uncounted(model: ModelSpec, spec: TrainingSpec) -> list[str]:
    """Return a sentence if activations of adapters outside of the layers are not counted."""
    outside = [path for path, _ in spec.parameters(model).ranks if "." not in path or path.endswith("embed_tokens")]
    if not outside:
        return []
    return [f"the adapters of {', '.join(outside)}: weights and optimizer states are counted, activations are not"]
