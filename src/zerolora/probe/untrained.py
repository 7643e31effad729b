"""Which modules of a run's targets no gradient would train: none in listed families, by a trial in others."""

from pathlib import Path

from zerolora.config.settings import RenderSettings
from zerolora.methods.registry import TRAINABLE
from zerolora.model.base_check import family_spec
from zerolora.types import Attention


def untrained(settings: RenderSettings, attention: Attention, model: Path) -> list[str]:
    """Return regular expressions of the trained modules that no gradient reaches in the model of directory `model`.

    Where a family's table has all modules of a method, each is on the way to the loss, and torch is not imported.
    Raises UserError if the settings name such a module (gradient_trial.py).
    """
    spec = family_spec(model)
    if spec and attention in spec.attentions and TRAINABLE[settings.method.name].fits_listed(settings.sections, spec):
        return []
    from zerolora.probe.gradient_trial import left_out

    return left_out(settings, attention, model)
