"""Checks of a training's settings against its model, beyond those of the methods."""

from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec


def uncounted(model: ModelSpec, spec: TrainingSpec) -> list[str]:
    """Return a line about each part of a training whose memory is only partly counted."""
    outside = [path for path, _ in spec.parameters(model).ranks if "." not in path or path.endswith("embed_tokens")]
    if not outside:
        return []
    return [f"the adapters of {', '.join(outside)}: weights and optimizer states are counted, activations are not"]
