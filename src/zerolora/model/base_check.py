"""Checks a base model's files against its class, built on the meta device.

transformers initializes missing weights at random and drops unknown ones; here both are errors. Only headers are read,
and both tensors of a shared weight.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolora.compat.transformers_patches import StoredNames, load_report, quantizable_paths, stored_names
from zerolora.errors import UserError, shown
from zerolora.model import foreign
from zerolora.model.architecture import auto_class, stacked_names, tokenizer_of
from zerolora.model.dequantized import weight_headers
from zerolora.model.families import FAMILIES
from zerolora.model.families.keys import Keys
from zerolora.model.manifest import check_loadable, check_needs_no_code
from zerolora.model.meta_device import build_on_meta, check_sizes
from zerolora.model.spec import ModelSpec
from zerolora.model.stored_quantization import packed_weights, stored_quantization, unpacked
from zerolora.model.weight_files import WEIGHT_INDEX, check_read_as_it_is, few, weight_files, weight_map
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile, equal, read_header

FLOATS = ("F32", "F16", "BF16")
"""safetensors' types of an unquantized weight."""
OLD_MASK = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$")
"""Causal masks, and their fill values, which GPT's classes once stored as buffers and now compute."""


def check_base(directory: Path) -> None:
    """Raise UserError unless the model in `directory` can be trained, evaluated and merged."""
    check_settings(directory)
    check_weights(directory)


def check_settings(directory: Path) -> None:
    """Raise UserError if config.json or the tokenizer of a model is missing, or transformers cannot load it."""
    config = directory / "config.json"
    if not config.is_file():
        raise UserError(f"{directory}: has no config.json, so it is not a transformers model; give another path")
    stored_quantization(directory)
    check_read_as_it_is(directory)
    foreign.check_model(directory)
    check_needs_no_code(directory)
    _build(directory)
    if not any(directory.glob("tokenizer*")):
        raise UserError(f"{directory}: has no tokenizer files; save the model's tokenizer there")
    tokenizer_of(directory)


def check_weights(directory: Path) -> list[TensorFile]:
    """Return the headers of a model's weight files.

    Raises UserError unless they contain exactly the weights that config.json describes, each once and in its shape.
    """
    check_loadable(directory)
    stored = stored_quantization(directory)
    check_needs_no_code(directory)
    _check_index(directory, [read_header(path) for path in weight_files(directory)])
    headers = weight_headers(directory)
    files = unpacked(directory, headers)
    if stored:
        _check_packed(directory, headers)
    if listed_spec(directory, files) is None:
        _compare(directory, files)
    else:
        _check_types(tensor for file in files for tensor in file.tensors.values())
    return files


def _check_packed(directory: Path, files: list[TensorFile]) -> None:
    """Raise UserError unless the weights that are stored in 4 bits are those that training would quantize."""
    model = _build(directory)
    expected = {f"{path}.weight" for path in quantizable_paths(model)} | {*stacked_names(model)}
    if wrong := sorted(expected.symmetric_difference(packed_weights(files))):
        which = "are not stored in 4 bits" if wrong[0] in expected else "are stored in 4 bits"
        raise UserError(
            f"{directory}: {few(wrong)} {which}, unlike what method: qlora quantizes; use the checkpoint in bf16, "
            "fp16 or fp32 that it was made of"
        )


def listed_spec(directory: Path, files: Iterable[TensorFile]) -> ModelSpec | None:
    """Return the spec of a model whose files contain exactly the weights, in the shapes, that its family lists.

    None if they contain others, or if the family is not in model/families/: the class must be built to check those.
    """
    spec = family_spec(directory)
    stored = {name: each.shape for file in files for name, each in file.tensors.items()}
    return spec if spec is not None and listed_shapes(spec) == stored else None


def family_spec(directory: Path) -> ModelSpec | None:
    """Return the spec that model/families/ lists for the config.json in `directory`; None without one."""
    path = directory / "config.json"
    config = foreign.model_config(directory)
    family = config.get("model_type")
    if family not in FAMILIES or config.get("add_cross_attention"):
        return None
    try:
        check_sizes(config, path)
        return FAMILIES[family](Keys(config, path, family))
    except UserError:
        return None


def listed_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by name."""
    return {
        f"{module.path.format(number)}.{name}": shape
        for module in spec.modules
        for number in module.numbers
        for name, shape in module.weights
    }


def check_shared(files: list[TensorFile], names: StoredNames, shared: Mapping[str, str], where: Path) -> None:
    """Raise UserError if the files contain two different tensors of a weight that the model shares.

    transformers loads both, except where weights are sharded while loading, so engines would train different models.
    `shared` maps each copy's name to the weight's; `where` is the model's config.json.
    """
    for copy, name in shared.items():
        one, other = stored_weight(copy, files, names), stored_weight(name, files, names)
        if one is not None and other is not None and not equal(one, other):
            raise UserError(
                f"{where}: tie_word_embeddings is true, but {copy} and {name} differ in the files; "
                "set it to false, or save the model with one of them"
            )


def _build(directory: Path) -> Any:
    path = directory / "config.json"
    config = foreign.model_config(directory)
    if "model_type" not in config:
        raise UserError(
            f"{path}: has no model_type; give the architecture's name, such as llama, or fetch the model again"
        )
    check_sizes(config, path)
    model = build_on_meta(config, path)
    auto_class(model.config, path)
    return model


def _check_index(directory: Path, files: list[TensorFile]) -> None:
    """Raise UserError if a tensor is in two files, or in another file than the index names."""
    where: dict[str, str] = {}
    for file in files:
        for name in file.tensors:
            if name in where:
                raise UserError(
                    f"{directory}: {shown(name)} is in {where[name]} and in {file.path.name}; keep one, or fetch the "
                    "model again"
                )
            where[name] = file.path.name
    wrong = sorted(name for name, file in weight_map(directory).items() if where.get(name) != file)
    if wrong:
        raise UserError(
            f"{directory / WEIGHT_INDEX}: names {few(wrong)} in files that do not contain it; fetch the whole model"
        )


def _compare(directory: Path, files: list[TensorFile]) -> None:
    """Raise UserError if a weight of the model is missing, unknown, or of another shape."""
    import torch

    model = _build(directory)
    # Buffers may be integers.
    floats = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    shared, names = dict(model.all_tied_weights_keys), stored_names(model)
    family = type(model).__name__
    empty = {
        each.name: torch.empty(each.shape, dtype=getattr(torch, TYPES.get(each.kind, ("uint8", 1))[0]), device="meta")
        for file in files
        for each in file.tensors.values()
    }
    weights = {name: names.of_model(name) for name in empty}
    _check_once(directory, weights)
    _check_types(each for file in files for each in file.tensors.values() if weights[each.name][0] in floats)
    report = load_report(model, empty)
    path = directory / "config.json"
    again = "correct config.json, or fetch the whole model"
    for name, (result, expected) in report.wrong.items():
        rows = model.config.get_text_config(decoder=True).vocab_size
        if result[1:] == expected[1:] and expected[:1] == (rows,):
            raise UserError(
                f"{path}: vocab_size is {rows}, but {name} has {result[0]} rows in the files; set vocab_size: "
                f"{result[0]}, or fetch the whole model"
            )
        more = f" ({few(list(report.wrong)[1:])} too)" if len(report.wrong) > 1 else ""
        raise UserError(
            f"{directory}: {name} is {list(result)} in the files, and {list(expected)} in a {family} of this "
            f"config.json{more}; {again}"
        )
    if report.unreadable:
        name, why = next(iter(report.unreadable.items()))
        raise UserError(f"{directory}: {name} cannot be made of the tensors in the files ({why:.200}); {again}")
    if report.missing:
        raise UserError(
            f"{directory}: its files lack {few(report.missing)} of a {family}, which would be drawn at random; {again}"
        )
    masks = {weights[each.name][0] for file in files for each in file.tensors.values() if _is_old_mask(each)}
    if surplus := [name for name in report.surplus if name not in masks]:
        raise UserError(
            f"{directory}: its files contain {few(surplus)}, and a {family} of this config.json has no such "
            f"weights; {again}"
        )
    check_shared(files, names, shared, path)


def _is_old_mask(tensor: StoredTensor) -> bool:
    """Return whether a tensor has a mask's name, and is a number or one square for all heads."""
    *others, rows, columns = (1, 1, *tensor.shape)
    return bool(OLD_MASK.search(tensor.name)) and rows == columns and set(others) <= {1}


def _check_once(directory: Path, weights: Mapping[str, tuple[str, bool]]) -> None:
    """Raise UserError if two stored tensors are the same weight, one of them under an older name."""
    seen: dict[str, str] = {}
    for name, (weight, converted) in weights.items():
        if not converted and (first := seen.setdefault(weight, name)) != name:
            raise UserError(
                f"{directory}: {shown(first)} and {shown(name)} are both read as {weight}; keep one in the files"
            )


def _check_types(stored: Iterable[StoredTensor]) -> None:
    for each in stored:
        if each.kind not in FLOATS:
            raise UserError(
                f"{each.path}: {shown(each.name)} is stored as {each.kind}, and weights of one of {', '.join(FLOATS)} "
                "are expected; take the model as it was before it was converted"
            )


def stored_weight(weight: str, files: list[TensorFile], names: StoredNames) -> StoredTensor | None:
    """Return the stored tensor of a weight; None if the weight is not stored as a tensor of its own."""
    shape = names.shapes[weight]
    alike = (each for file in files for each in file.tensors.values() if each.shape == shape)
    return next((each for each in alike if names.of_model(each.name) == (weight, False)), None)
