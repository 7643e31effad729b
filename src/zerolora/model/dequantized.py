"""A quantized checkpoint as the bf16 model that it is: headers of its files, and weights dequantized as they are read.

A format (quantized/) says which stored tensors a weight is made of, and its values in fp32, which are rounded once.
Tensors of floats are read as they are stored. Each stored tensor is used exactly once, or the checkpoint is refused.

`fetch` writes this model to files (fetch/dequantize.py) or, with dequantize: on_load, beside the published files of
weights its config.json and MARK. Every reader of a model's weights then takes their headers from here, so it sees
the files that `fetch` would have written.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.files import read_object
from zerolora.model.quantized.checkpoint import ACTIVATIONS, FLOATS, INSTEAD, Checkpoint, Stated, Weight
from zerolora.model.quantized.formats import FORMATS
from zerolora.model.weight_files import weight_files
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile, header_of, read_header

if TYPE_CHECKING:
    import torch

KIND = "BF16"
QUANTIZATION = "quantization_config"
"""Key of a config.json, or of the config of a part of the model in it, and of MARK."""
FROM = "dequantized_from"
"""Key of the metadata of a file of weights: the quantization_config that they had."""
MARK = "dequantized_on_load.json"
"""Beside published files of weights: their quantization_config, and the tensors that are left out."""


@dataclass(frozen=True, eq=False)
class DequantizedTensor(StoredTensor):
    """A quantized weight in bf16. It has no bytes of its own in the file of its codes."""

    weight: Weight

    @property
    def nbytes(self) -> int:
        """Bytes in bf16."""
        return math.prod(self.shape) * TYPES[KIND][1]

    def read(self, first: int = 0, last: int | None = None) -> "torch.Tensor":
        """Return the rows `first` to `last` along the first dimension. Those before are dequantized too."""
        first, last, _ = slice(first, last).indices(self.shape[0])
        (rows,) = self.in_turn([(first, last)])
        return rows

    def in_turn(self, spans: Iterable[tuple[int, int]], device: Any = None) -> "Iterator[torch.Tensor]":
        """Yield the rows of each of `spans`, which ascend and do not overlap, on a device, a block at a time.

        Raises UserError if a number is not finite.
        """
        import torch

        blocks, begin, end = self.blocks(), 0, 0
        size = math.prod(self.shape[1:])
        for first, last in spans:
            rows = torch.empty((last - first, *self.shape[1:]), dtype=torch.bfloat16, device=device)
            at, stop = first * size, last * size
            while at < stop:
                while end <= at:
                    block = next(blocks).reshape(-1)
                    begin, end = end, end + len(block)
                part = block[at - begin : stop - begin]
                rows.view(-1)[at - first * size :][: len(part)] = part
                at += len(part)
            yield rows

    def blocks(self) -> "Iterator[torch.Tensor]":
        """Yield its numbers in order, some at a time. Raises UserError if one is not finite."""
        import torch

        for block in self.weight.blocks():
            rounded = block.to(torch.bfloat16)
            # The sum of finite numbers may be infinite, and takes a tenth of the time.
            if not bool(rounded.sum(dtype=torch.float32).isfinite()) and not bool(rounded.isfinite().all()):
                codes = self.weight.stored[0]
                raise UserError(f"{codes.path}: {shown(codes.name)} has a number that is not finite; {INSTEAD}")
            yield rounded


def is_dequantized_on_load(directory: Path) -> bool:
    """Return whether the weights of a model directory, or of a model whose small files it has, stay quantized in their
    files."""
    return (directory / MARK).is_file()


def check_quantizes(directory: Path, method: str, quantizes: bool) -> None:
    """Raise UserError if the weights of a model are dequantized as they are loaded, and a method does not quantize them
    again: each rank would hold its own copy, where the estimate counts pages of a file in bf16 that ranks share."""
    if is_dequantized_on_load(directory) and not quantizes:
        raise UserError(
            f"train.method is {method}, and the base model was fetched with dequantize: on_load, which is for qlora "
            "and qdora; use one of these, or dequantize: on_fetch"
        )


def weight_headers(directory: Path) -> list[TensorFile]:
    """Return the headers of a model's files of weights; if these are dequantized as they are loaded, the headers that
    they would have in bf16."""
    if not is_dequantized_on_load(directory):
        return [read_header(path) for path in weight_files(directory)]
    mark = _mark(directory)
    checkpoint = read_checkpoint(directory, Stated(directory / MARK, mark[QUANTIZATION]))
    return bf16_files(checkpoint, mark["left_out"])


def kept_quantization(directory: Path) -> dict[str, Any]:
    """Return the quantization_config of weights that are dequantized whenever they are loaded."""
    result: dict[str, Any] = _mark(directory)[QUANTIZATION]
    return result


def _mark(directory: Path) -> dict[str, Any]:
    """Return the content of MARK. Raises UserError if it is not that which fetch writes."""
    path, stage = directory / MARK, "zerolora stage fetch"
    result = read_object(path, stage)
    match result:
        case {"quantization_config": {"quant_method": str(method)}, "left_out": list()} if method in FORMATS:
            return result
    raise UserError(f"{path}: was not written by this version of zerolora; run `{stage}` again")


def read_checkpoint(directory: Path, stated: Stated) -> Checkpoint:
    """Return the weights of the quantized checkpoint that `stated` describes, from the headers of its files."""
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, each in read_header(path).tensors.items():
            if name in stored:
                raise UserError(f"{path}: {shown(name)} is in {stored[name].path.name} too; keep one")
            stored[name] = each
    result = Checkpoint(stated, stored)
    FORMATS[stated.values["quant_method"]](result)
    return result


def bf16_files(checkpoint: Checkpoint, left_out: Iterable[str]) -> list[TensorFile]:
    """Return the headers of the model in bf16, each weight in the file of its codes, without tensors that are
    `left_out`.

    Raises UserError for a tensor that is neither a float nor a part of exactly one weight, and for two of one name.
    """
    method = checkpoint.stated.values["quant_method"]
    used: dict[str, str] = {}
    for weight in checkpoint.weights:
        for each in weight.stored:
            assert each.name not in used, f"{each.name} is of {used[each.name]} and of {weight.name}"
            used[each.name] = weight.name
    made = {weight.stored[0].name: weight for weight in checkpoint.weights}
    omitted = {*left_out}
    result: dict[Path, dict[str, StoredTensor]] = {}
    names: dict[str, str] = {}
    for name, each in checkpoint.stored.items():
        if name in made:
            weight = made[name]
            tensor: StoredTensor = DequantizedTensor(each.path, weight.name, KIND, weight.shape, 0, 0, weight)
        elif name in used or name in omitted or name.endswith(ACTIVATIONS):
            continue
        elif each.kind in FLOATS:
            tensor = each
        else:
            raise UserError(
                f"{each.path}: {shown(name)} is stored as {each.kind}, and no weight of {method} has such a tensor; "
                f"{INSTEAD}"
            )
        if (first := names.setdefault(tensor.name, name)) != name:
            raise UserError(f"{each.path}: {shown(first)} and {shown(name)} are both {tensor.name}; keep one")
        result.setdefault(each.path, {})[tensor.name] = tensor
    if not made:
        raise UserError(
            f"{checkpoint.stated.path}: {checkpoint.stated.key} states {method}, and no tensor of the files is; "
            f"{INSTEAD}"
        )
    metadata = {FROM: json.dumps(checkpoint.stated.values, sort_keys=True)}
    return [_file(path, tensors, metadata) for path, tensors in result.items()]


def _file(path: Path, tensors: dict[str, StoredTensor], metadata: Mapping[str, str]) -> TensorFile:
    header = header_of(((each.name, each.kind, each.shape) for each in tensors.values()), metadata)
    return TensorFile(path, {"format": "pt", **metadata}, tensors, header, tuple(tensors))


def index_of(files: Iterable[TensorFile]) -> dict[str, Any]:
    """Return the content of the index of a model in these files."""
    files = list(files)
    where = {name: file.path.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(file.nbytes for file in files)}, "weight_map": where}


def origin(directory: Path) -> Any:
    """Return the quantization_config of the checkpoint that the weights of a directory are of; None if they were not
    quantized."""
    metadata = (file.metadata for file in weight_headers(directory))
    found = next((each[FROM] for each in metadata if each and FROM in each), None)
    return None if found is None else json.loads(found)
