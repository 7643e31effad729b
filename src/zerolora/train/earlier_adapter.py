"""train.from_adapter: training that starts from an earlier adapter in peft's format, or from all weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zerolora.errors import UserError, shown
from zerolora.files import sha256
from zerolora.methods.adapter_config import SELECTING, WITHOUT_MEANING
from zerolora.methods.method import WHOLE_WEIGHTS, TrainableMethod, without_copies
from zerolora.methods.peft_format import ADAPTER, CONFIG, PREFIX, is_copy
from zerolora.model import foreign
from zerolora.model.added_tokens import AddedToken, of_directory
from zerolora.tensor_file import read_header
from zerolora.train.engines.engine import trained

KIND = {"peft_type": "method", "use_dora": "method"}
"""The keys of peft's config that decide the kind of adapter, with ours; each method has further ones (`meaning`)."""
HARMLESS = (WITHOUT_MEANING - {"corda_config", "eva_config", "lora_ga_config"}) | SELECTING
"""Keys that do not decide what the tensors mean, and keys that select the tensors, whose names and shapes are compared
themselves."""
HARMLESS_INITS = (True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights whose saved factors fit the unchanged base (peft/tuners/lora/layer.py)."""


def load(
    model: Any, directory: Path, method: type[TrainableMethod], tokens: Sequence[AddedToken] = ()
) -> dict[str, Any]:
    """Load the trained parameters of a built model from `directory`, and return its provenance.

    Every rank reads the files; parameters on the meta device stay there. Raises UserError if names, shapes or scales
    are not those of the method, or the adapter was trained with other added tokens than `tokens`.
    """
    path, parameters = weights_of(directory, method), method.published(model, trained(model))
    check_start(model, directory, method, tokens, parameters)
    if not method.peft_type:
        without_copies(path, read_header(path).tensors, model.all_tied_weights_keys)
    with _opened(path) as file:
        for name, parameter in parameters.items():
            value = file.get_tensor(name)
            if not bool(torch.isfinite(value).all()):
                raise UserError(
                    f"train.from_adapter: {path}: {name} contains numbers that are not finite; name another adapter"
                )
            if not parameter.requires_grad and not torch.equal(value.float(), parameter.float()):
                raise UserError(
                    f"train.from_adapter: {path}: {name} is not what this run draws; name an adapter with the same "
                    f"settings of {' and '.join(f'train.{each}' for each in method.sections)} and version of torch"
                )
            _set(parameter, value)
    return provenance(directory, method)


def check_start(
    model: Any,
    directory: Path,
    method: type[TrainableMethod],
    tokens: Sequence[AddedToken],
    parameters: dict[str, Any],
) -> None:
    """Raise UserError if names, shapes, scale or added tokens of a directory are not those of the built `model`."""
    path = weights_of(directory, method)
    if (theirs := of_directory(directory)) != list(tokens):
        added = ", ".join(shown(each.token) for each in theirs) or "none"
        raise UserError(
            f"train.from_adapter: {directory}: was trained with other tokens than the data adds; list {added} in "
            "add_special_tokens and add_tokens of the data set, in that order"
        )
    if method.peft_type:
        check_meaning(directory, model.peft_config["default"], method)
    with _opened(path) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        copies = _copies(model, directory, method) - parameters.keys()
        _check_tensors(path, {name: shape for name, shape in shapes.items() if name not in copies}, parameters)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises UserError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"train.from_adapter: {path}: not a whole safetensors file ({error}); choose another") from None


def _copies(model: Any, directory: Path, method: type[TrainableMethod]) -> set[str]:
    """Return the names of copies of embedding and head; beginning.py and without_copies compare their values."""
    base = model.get_base_model() if method.peft_type else model
    if not method.peft_type:
        return set(base.all_tied_weights_keys)
    tables, config = (base.get_input_embeddings(), base.get_output_embeddings()), foreign.adapter_config(directory)
    paths = [name for name, module in base.named_modules() if any(module is each for each in tables)]
    infixes = (".base_layer.", ".")
    names = {f"{PREFIX}{path}{infix}{part}" for path in paths for infix in infixes for part in ("weight", "bias")}
    return {name for name in names if is_copy(name, config)}


def weights_of(directory: Path, method: type[TrainableMethod]) -> Path:
    """Return the file with the method's weights. Raises UserError if there is none."""
    path = directory / (ADAPTER if method.peft_type else WHOLE_WEIGHTS)
    if not path.is_file():
        wanted = "an adapter in peft's format" if method.peft_type else "all weights, as method: full publishes them"
        raise UserError(f"train.from_adapter: {path}: there is no such file; name a directory with {wanted}")
    return path


def provenance(directory: Path, method: type[TrainableMethod]) -> dict[str, Any]:
    """Return the path of a directory, the sha256 of its weights, and their recorded origin."""
    path = weights_of(directory, method)
    manifest = foreign.adapter_manifest(directory)
    known = manifest.get("files", {}).get(path.name, {}).get("sha256")
    result = {"directory": str(directory), "sha256": known or sha256(path)}
    return result | {key: manifest[key] for key in ("source", "license", "from_adapter") if key in manifest}


def is_unchanged(tensors: dict[str, torch.Tensor], directory: Path, method: type[TrainableMethod]) -> bool:
    """Return whether published tensors equal those that training started from, if those still exist."""
    path = directory / (ADAPTER if method.peft_type else WHOLE_WEIGHTS)
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return all(torch.equal(tensor.float(), file.get_tensor(name).float()) for name, tensor in tensors.items())


def check_meaning(directory: Path, config: Any, method: type[TrainableMethod]) -> None:
    """Raise UserError if an adapter's config gives its tensors another meaning than peft's `config` of `method`."""
    ours, theirs, plain = config.to_dict(), foreign.adapter_config(directory), type(config)().to_dict()
    meaning = {**KIND, **method.meaning}
    differences, settings = [], []
    for key, setting in meaning.items():
        here = getattr(ours.get(key), "value", ours.get(key))
        there = theirs.get(key, getattr(plain.get(key), "value", plain.get(key)))  # peft's default
        if key in ours and (there or None) != (here or None):
            differences.append(f"{key} is {shown(there)}, and this run's is {shown(here)}")
            settings.append(f"train.{setting}")
    if differences:
        raise UserError(
            f"train.from_adapter: {directory / CONFIG}: {'; '.join(differences)}; set "
            f"{' and '.join(dict.fromkeys(settings))} as that adapter has {'it' if len(settings) == 1 else 'them'}"
        )
    for key, there in theirs.items():
        if key in meaning or key in HARMLESS or not there or there in (plain.get(key), ours.get(key)):
            continue
        if key != "init_lora_weights" or there not in HARMLESS_INITS:
            raise UserError(
                f"train.from_adapter: {directory / CONFIG}: {key} is {shown(there)}, with which its tensors mean "
                "something else than this run's; name an adapter without it, or merge it into its base with peft and "
                "train on that"
            )


def _check_tensors(path: Path, stored: dict[str, list[int]], expected: dict[str, Any]) -> None:
    shapes = {name: list(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in expected.items()}
    faults = [f"{name} is missing" for name in shapes if name not in stored]
    faults += [f"{name} is not trained by this run" for name in stored if name not in shapes]
    faults += [
        f"{name} is {stored[name]}, and this run's is {shape}"
        for name, shape in shapes.items()
        if name in stored and stored[name] != shape
    ]
    if faults:
        more = f" (and {len(faults) - 1} more such)" if len(faults) > 1 else ""
        raise UserError(
            f"train.from_adapter: {path}: {faults[0]}{more}; use the method, r and targets of that adapter, and its "
            "base model"
        )


def _set(parameter: Any, value: torch.Tensor) -> None:
    if parameter.is_meta:
        return
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
    else:
        parameter.data = value.to(parameter.device, parameter.dtype, copy=True)
