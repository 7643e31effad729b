"""Check a run's export targets before training, on stand-ins for its adapter and merged model.

The adapter has its config, and names and shapes of its tensors; the merged model has the base's files, with the prompt
format and tokens of the data. The targets run the same checks as after training (targets/target.py).
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.export.llama_cpp import MissingProgram
from zerolora.export.targets import TARGETS
from zerolora.export.targets.target import RunResult
from zerolora.files import write_json
from zerolora.log import LOGGER
from zerolora.machine.submit_host import submits
from zerolora.methods import lora_init
from zerolora.methods.peft_format import ADAPTER, CONFIG, portable
from zerolora.methods.registry import TRAINABLE
from zerolora.model.added_tokens import add_rows, of_data, write
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.manifest import is_weight, model_files
from zerolora.model.prompt_format import write_prompt_format, write_tokens
from zerolora.tensor_file import write_shapes

OURS = "the adapter of this run"


@dataclass(frozen=True)
class TrainedShapes:
    """The trained tensors, on the meta device."""

    tensors: Mapping[str, Any]
    config: Any
    """peft's config; None without an adapter."""


def check_targets(
    settings: RenderSettings, published: TrainedShapes, model: Path, weights: Path | None, data: Path | None
) -> None:
    """Raise UserError for a target that could not be made from the run's outputs.

    `model` is the base model's directory without weights, `weights` with them; if None, targets of the merged model are
    left to `zerolora export`. `data` is the prepared data.
    """
    with tempfile.TemporaryDirectory() as folder:
        adapter, merged = Path(folder) / "adapter", Path(folder) / "merged"
        _write_adapter(adapter, settings, published, data)
        if weights is not None:
            _write_merged(merged, weights, data)
        source = RunResult(model, weights or model, adapter, data or model, merged if weights else None)
        for name, values in settings.targets.items():
            target = TARGETS[name]
            if target.of_merged and weights is None:
                LOGGER.info("export.targets: %s: not checked without weights; zerolora export checks it", name)
                continue
            checked = target.settings.model_validate(values)
            try:
                _check_target(name, source, checked)
            except UserError as error:
                text = str(error).replace(str(adapter), OURS).replace(str(merged), str(model))
                raise UserError(text if text.startswith("export.") else f"export.targets: {name}: {text}") from None


def _check_target(name: str, source: RunResult, settings: Any) -> None:
    target = TARGETS[name]
    try:
        target.check(source, settings)
    except MissingProgram as error:
        if not submits():
            raise
        LOGGER.warning("%s (on this machine; export checks its own machine)", error)
    target.try_out(source, settings)


def _write_adapter(adapter: Path, settings: RenderSettings, published: TrainedShapes, data: Path | None) -> None:
    adapter.mkdir()
    method, tensors = TRAINABLE[settings.method.name], dict(published.tensors)
    if published.config is None:
        return
    config = portable(published.config, {"name": None, "revision": None})
    if "lora" in method.sections and settings.sections.lora.init != DEFAULT_INIT:
        factors = {name: tensor for name, tensor in tensors.items() if ".lora_A." in name or ".lora_B." in name}
        tensors, config = lora_init.published(tensors, factors), lora_init.doubled(config)
    write_json(adapter / CONFIG, config)
    write_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, adapter / ADAPTER)
    if data is not None:
        write(adapter, of_data(data))


def _write_merged(merged: Path, base: Path, data: Path | None) -> None:
    merged.mkdir()
    for path in model_files(base):
        if is_weight(path.name):
            (merged / path.name).symlink_to(path.absolute())
        else:
            shutil.copyfile(path, merged / path.name)
    if data is None:
        return
    if tokens := of_data(data):
        built = built_on_meta(config_of(base))
        add_rows(built, tokens)
        write_tokens(merged, tokens, built.config.get_text_config().vocab_size)
    write_prompt_format(data, merged)
