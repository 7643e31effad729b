"""Try a run's training and merge on the tables of families and methods, which takes no torch.

A family's table lists the names, shapes and kinds of its class's weights, and its attention. Where the files contain
exactly these and the method adapts linear modules among them, building the class would show nothing more. All other
runs are tried on shapes (meta_trial.py).
"""

from pathlib import Path

from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.methods.registry import TRAINABLE
from zerolora.model.base_check import FLOATS, family_spec, listed_spec
from zerolora.model.dequantized import check_quantizes, weight_headers
from zerolora.model.manifest import weight_directory
from zerolora.model.stored_quantization import check_trainable, stored_quantization
from zerolora.model.weight_files import WEIGHTS
from zerolora.types import Attention


def check(settings: RenderSettings, attention: Attention, model: Path, weights: Path, data: Path | None = None) -> None:
    """Raise UserError if the model of directory `model`, written by fetch, cannot be trained with a run's settings and
    train.from_adapter, or the result could not be merged into its files or exported.

    `data` is the prepared data with its added tokens; without it, train.from_adapter is not checked. `weights` is the
    directory of downloaded weights. Names are checked only where those are on this machine.
    """
    check_stored(settings, model)
    if not _is_listed(settings, attention, model, weights):
        from zerolora.probe.meta_trial import check as try_on_shapes

        try_on_shapes(settings, attention, model, weights, data)


def takes_shapes(settings: RenderSettings, model: Path, weights: Path) -> bool:
    """Return whether planning a run imports torch: its model has no table, is not fetched, or is tried on shapes."""
    try:
        spec = family_spec(model) if (model / "config.json").is_file() else None
    except UserError:
        return True
    return spec is None or not _is_listed(settings, spec.attentions[0], model, weights)


def check_stored(settings: RenderSettings, model: Path) -> None:
    """Raise UserError if a base model that is stored quantized does not allow a run's method, merge or exports."""
    stored, method = stored_quantization(model), TRAINABLE[settings.method.name]
    check_quantizes(model, method.name, method.quantizes())
    check_trainable(stored, method.name, method.quantizes(), settings.sections.quantization)
    if stored and (settings.merged or settings.targets):
        key, value = ("merge.enabled", "false") if settings.merged else ("export.targets", "[]")
        raise UserError(
            f"{key}: the base model is stored in 4 bits ({stored.type}), to which nothing can be added; set {key}: "
            f"{value}, or fetch the checkpoint in bf16, fp16 or fp32 that it was made of"
        )


def _is_listed(settings: RenderSettings, attention: Attention, model: Path, weights: Path) -> bool:
    """Return whether tables accept the run. An adapter to start from and exports need shapes."""
    spec = family_spec(model)
    if spec is None or attention not in spec.attentions:
        return False
    if settings.targets or settings.from_adapter:
        return False
    if not TRAINABLE[settings.method.name].fits_listed(settings.sections, spec):
        return False
    directory = weight_directory(model, weights)
    if not any(directory.glob(WEIGHTS)):
        LOGGER.info("%s: no weights here, so the names that merge updates are not checked", directory)
        return True
    files = weight_headers(directory)
    whole = all(each.kind in FLOATS for file in files for each in file.tensors.values())
    return whole and listed_spec(model, files) is not None
