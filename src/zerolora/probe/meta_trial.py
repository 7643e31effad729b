"""Try a run's training and merge on shapes alone, so that a model's limits show before a job waits in a queue.

The real class is built on the meta device with the chosen attention, the method is applied as in training, and its
tensors are merged into the names and shapes of the base model's files. That takes torch, some seconds and no weights.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.transformers_patches import StoredNames, stored_names
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.export.early import TrainedShapes, check_targets
from zerolora.files import MANIFEST
from zerolora.log import LOGGER
from zerolora.merge.merge_plan import plan_merge
from zerolora.methods.method import Update
from zerolora.methods.peft_format import read_alike
from zerolora.methods.registry import TRAINABLE, check_published
from zerolora.model.added_tokens import AddedToken, add_rows, of_data
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.base_check import check_shared
from zerolora.model.dequantized import weight_headers
from zerolora.model.manifest import weight_directory
from zerolora.model.stored_quantization import stored_quantization, unpacked
from zerolora.model.weight_files import WEIGHTS
from zerolora.tensor_file import TensorFile
from zerolora.train.attention import IMPLEMENTATIONS, check_attention, no_attention
from zerolora.train.beginning import check_copies, check_identity
from zerolora.train.earlier_adapter import check_start, weights_of
from zerolora.train.engines.engine import trained
from zerolora.types import Attention

TOKENS = 8  # of the row that tests the attention


def check(settings: RenderSettings, attention: Attention, model: Path, weights: Path, data: Path | None = None) -> None:
    """Raise UserError if the model of directory `model`, written by fetch, cannot be trained with a run's settings and
    train.from_adapter, or the result could not be merged into its files or exported.

    `data` is the prepared data with its added tokens; without it, train.from_adapter is not checked. `weights` is the
    directory of downloaded weights. Names are checked only where those are on this machine. listed_trial.py calls this
    after check_stored.
    """
    stored = stored_quantization(model)
    bitsandbytes_patches.load()
    config = config_of(model)
    updates, published = _updates(_attending(config, attention), settings)
    if settings.from_adapter and data is not None:
        _check_start(settings, Path(settings.from_adapter), config, model, of_data(data))
    directory = weight_directory(model, weights)
    present = any(directory.glob(WEIGHTS))
    if settings.targets:
        check_targets(settings, published, model, directory if present else None, data)
    if not present:
        LOGGER.info("%s: no weights here, so the names that merge updates are not checked", directory)
        return
    built = built_on_meta(config)
    files, names = unpacked(directory, weight_headers(directory)), stored_names(built)
    if settings.from_adapter and data is not None:
        check_copies(Path(settings.from_adapter), TRAINABLE[settings.method.name], directory)
    check_shared(files, names, built.all_tied_weights_keys, model / "config.json")
    if stored is None:
        _merge(files, names, updates, model)


def _attending(config: Any, attention: Attention) -> Any:
    """Return the model on the meta device. Raises UserError if it does not have this attention."""
    check_attention(attention, config)
    try:
        model = built_on_meta(config, IMPLEMENTATIONS.get(attention, attention))
    except ValueError as error:
        raise no_attention(attention, error) from None
    if attention != "flash":
        return model
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    torch_log.disabled = True  # it logs the end of the pass with a traceback
    try:
        # Fake tensors: transformers does not read their values to detect packed rows.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model(input_ids=torch.zeros((1, TOKENS), dtype=torch.int64, device="meta"), use_cache=False)
    except UserError:
        raise
    # Shapes do not suffice after the first layer's attention: experts are chosen by values.
    except Exception as error:
        LOGGER.debug("on shapes alone, a forward pass ends with %s", error)
    finally:
        torch_log.disabled = False
    return model


def _updates(model: Any, settings: RenderSettings) -> tuple[dict[str, Update], TrainedShapes]:
    """Return merge's updates and the published tensors, as shapes. Raises UserError if the method does not fit."""
    base = built_on_meta(model.config)
    method = TRAINABLE[settings.method.name]
    with torch.device("meta"):
        built = method.build(model, settings.sections)
        published = {name: tensor.detach() for name, tensor in method.published(built, trained(built)).items()}
        config = read_alike(built) if method.peft_type else None
        updates = method.updates_of(published, config.to_dict() if config else {}, base)
    return updates, TrainedShapes(published, config)


def _check_start(settings: RenderSettings, start: Path, config: Any, model: Path, tokens: Sequence[AddedToken]) -> None:
    """Raise UserError if the adapter `start` is incomplete, or of another base, method or settings."""
    if not start.is_dir():
        LOGGER.info("train.from_adapter: %s: does not exist yet; training will check it", start)
        return
    method = TRAINABLE[settings.method.name]
    weights_of(start, method)
    check_identity(start, method, model / MANIFEST)
    # First faults of the adapter itself, then differences from the run.
    try:
        check_published(start, model)
    except UserError as error:
        raise UserError(f"train.from_adapter: {error}") from None
    built = built_on_meta(config)
    rows = add_rows(built, tokens)
    with torch.device("meta"):
        built = method.build(built, settings.sections, rows)
    check_start(built, start, method, tokens, method.published(built, trained(built)))


def _merge(files: list[TensorFile], names: StoredNames, updates: dict[str, Update], model: Path) -> None:
    """Raise UserError if a trained weight is in no file, has another shape there, or a form that cannot be written."""
    try:
        plan = plan_merge(files, names, updates)
    except UserError as error:
        raise UserError(f"{model}: training would end in what its files cannot take: {error}") from None
    if missing := plan.missing(updates):
        raise UserError(
            f"{model}: its files hold no {missing[0]}, which would be trained and could not be merged; fetch the whole "
            "model in a type that is not quantized, or use targets without it"
        )
