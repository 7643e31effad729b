"""What is counted of a model and what is not, where it is more than a decoder of equal layers: one sentence each."""

from collections import defaultdict

from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec, Module

VISION, AUDIO = ("vision", "visual", "image"), ("audio", "speech")
STATE_SPACE = ("mamba", "ssm", "mixer.conv1d")


def notes(model: ModelSpec, spec: TrainingSpec) -> list[str]:
    """Return what was assumed of a model under a training spec, for people; empty if nothing was."""
    return [
        *_layers(model),
        *_experts(model, spec),
        *_towers(model),
        *_encoder(model),
        *_stored(model),
        *_loading(spec),
    ]


def _layers(model: ModelSpec) -> list[str]:
    found = []
    if model.counted != "config.json" and not (model.experts or model.latent):
        found.append(
            "activations: traced as those of a decoder of these sizes; the architecture has no file of its own"
        )
    paths = [module.path for module in model.in_layers]
    if any("linear_attn" in path for path in paths):
        found.append("linear attention: traced as attention over all tokens")
    if any(name in path for path in paths for name in STATE_SPACE):
        found.append("state-space layers: traced as attention")
    return found


def _experts(model: ModelSpec, spec: TrainingSpec) -> list[str]:
    if not model.experts:
        return []
    found = [
        "experts: computed by one grouped product, whose memory does not depend on the routing; "
        "the router's auxiliary loss is not counted"
    ]
    parameters = {
        f"{module.path}.{name}": module.count for module in model.modules for name, _ in module.weights
        if module.kind == "experts"
    }  # fmt: skip
    if any(path in parameters for path, _ in spec.parameters(model).ranks):
        found.append("experts: an adapter makes a copy of all experts' weights of a layer, kept for the backward pass")
    if spec.method.frozen_type and parameters:
        found.append("experts: not quantized, since they are no linear modules; nor is the router")
    return found


def _towers(model: ModelSpec) -> list[str]:
    stacks: dict[str, int] = defaultdict(int)
    for module in model.modules:
        if name := _tower(module):
            stacks[name] += module.parameters * module.count
    return [
        f"{name}: {count:,} parameters counted, no {name.partition(' ')[0]} rows and no activations of it"
        for name, count in stacks.items()
    ]


def _tower(module: Module) -> str:
    path = module.path.lower()
    if any(name in path for name in VISION):
        return "image encoder"
    return "audio encoder" if any(name in path for name in AUDIO) else ""


def _encoder(model: ModelSpec) -> list[str]:
    if not model.encoder_layers:
        return []
    return [
        "encoder: its rows are assumed as long as the decoder's, and each of its layers as large as a decoder layer; "
        "cross-attention counts as half a layer"
    ]


def _stored(model: ModelSpec) -> list[str]:
    return [f"weights: stored as {model.stored_as}, counted in the run's precision"] if model.stored_as else []


def _loading(spec: TrainingSpec) -> list[str]:
    if spec.method.frozen_type is None or spec.layout.stage < 3:
        return []
    return ["loading: each rank reads the quantized base model whole before it keeps its shard"]
