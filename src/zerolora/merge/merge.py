"""Merge the adapter into the base model, one weight file at a time, into a directory that plain transformers loads.

    zerolora merge --weights resources/weights/MODEL.json --adapter results/NAME/adapter --data results/data/NAME
                   --place results/NAME/merged --output results/NAME/merged

Only one weight file of the base is in memory at a time, so a 70B model needs the memory of its largest shard. The
update is computed in fp32 and rounded once, to the dtype of the base weight.
"""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zerolora import added_tokens
from zerolora.architecture import built_on_meta, config_of
from zerolora.compat.transformers import StoredNames, stored_names
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, read_json, staged_directory, write_json
from zerolora.log import result
from zerolora.manifest import WEIGHTS, is_weight, model_files
from zerolora.merge.tokenizer import write_size, write_tokens
from zerolora.methods.base import Update
from zerolora.methods.registry import of_directory
from zerolora.progress import Progress
from zerolora.prompt_format import write_prompt_format
from zerolora.units import byte_size

FLOATS = ("F32", "F16", "BF16")
"""The types of a weight that is not quantized, as safetensors writes them."""


def merge(base: Path, adapter: Path, output: Path, place: Path, data: Path | None = None) -> None:
    """Write the merged model to directory `place` and its manifest to `output`/manifest.json.

    `place` is `output` itself if the weights are versioned; otherwise it is another directory, and only their hashes
    are versioned. With `data`, the prepared rows, the model gets their prompt format. Raises UserError if the adapter
    was trained on another base model.
    """
    with staged_directory(place) as staged:
        _write_merged(base, adapter, staged, data)
        files = describe(staged)
        manifest = {"path": str(place), "files": files}
        if place == output:
            write_json(staged / MANIFEST, manifest)
    if place != output:
        with staged_directory(output) as staged:
            write_json(staged / MANIFEST, manifest)
    size = byte_size(sum(file["bytes"] for file in files.values()))
    result(size if place == output else f"{size} in {place}")


def restore(base: Path, adapter: Path, manifest: Path, data: Path | None = None) -> None:
    """Merge again if the weights that `manifest` describes are missing or differ in size.

    Raises UserError if the result differs from the manifest.
    """
    expected = read_json(manifest, "zerolora merge")
    place = Path(expected["path"])
    sizes = {name: file["bytes"] for name, file in expected["files"].items()}
    if not all((place / name).is_file() and (place / name).stat().st_size == sizes[name] for name in sizes):
        with staged_directory(place) as staged:
            _write_merged(base, adapter, staged, data)
            if describe(staged) != expected["files"]:
                raise UserError(f"{manifest}: base and adapter here merge to other weights; run the merge stage again")


def _write_merged(base: Path, adapter: Path, staged: Path, data: Path | None) -> None:
    model, tokens = built_on_meta(config_of(base)), added_tokens.of_directory(adapter)
    added_tokens.add_rows(model, tokens)
    updates = of_directory(adapter).updates(adapter, model)
    for path in model_files(base):
        if not is_weight(path.name):
            shutil.copyfile(path, staged / path.name)
    if tokens:
        write_tokens(staged, tokens, model.config.get_text_config().vocab_size)
    if data is not None:
        write_prompt_format(data, staged)
    weights = UpdatedWeights(sorted(base.glob(WEIGHTS)), stored_names(model), updates)
    with Progress("file", len(weights.files)) as bar:
        for path, names in weights.files.items():
            tensors = {name: weights.tensor(name) for name in names}
            save_file(tensors, staged / path.name, weights.metadata[path])
            bar.update()
    write_size(staged, weights.more_parameters, weights.more_bytes)
    missing = sorted(name for name in updates.keys() - weights.updated if not updates[name].optional)
    if missing:
        raise UserError(f"{adapter}: the base has no {missing[0]}; this adapter was trained on another model")


class UpdatedWeights:
    """The tensors of a base model's files, as they are after training."""

    def __init__(self, paths: list[Path], names: StoredNames, updates: dict[str, Update]) -> None:
        self.files: dict[Path, list[str]] = {}
        self.metadata: dict[Path, dict[str, str] | None] = {}
        self.updated: set[str] = set()
        """The weights of the model that an update was applied to."""
        self.more_parameters = self.more_bytes = 0
        """Of the rows of added tokens."""
        self._names, self._updates = names, updates
        self._parts: dict[str, list[str]] = {}  # stored tensors of each weight that has to be converted
        self._split: dict[str, torch.Tensor] = {}  # converted tensors whose file comes later
        self._file: dict[str, Path] = {}
        self._types: dict[str, str] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self.files[path], self.metadata[path] = list(file.keys()), file.metadata()
                self._types |= {name: file.get_slice(name).get_dtype() for name in self.files[path]}
            for name in self.files[path]:
                self._file[name] = path
                weight, converted = names.of_model(name)
                if converted:
                    self._parts.setdefault(weight, []).append(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a stored tensor after training, in its own dtype."""
        if name in self._split:
            return self._split.pop(name)
        weight, converted = self._names.of_model(name)
        if not converted:
            if weight in self._updates:
                self._check_type(name)
            return self._applied(weight, self._read(name))
        parts = self._parts[weight]
        before = {part: self._read(part) for part in parts}
        weights = self._names.converted(before)
        if not weights.keys() & self._updates.keys():
            return before[name]
        for part in parts:
            self._check_type(part)
        after = {each: self._applied(each, tensor) for each, tensor in weights.items()}
        self._split |= {part: tensor.contiguous() for part, tensor in self._names.stored(after, parts).items()}
        return self._split.pop(name)

    def _check_type(self, name: str) -> None:
        """Raise UserError if a stored tensor holds other numbers than those of a weight."""
        if self._types[name] not in FLOATS:
            raise UserError(
                f"{self._file[name]}: {name} is stored as {self._types[name]}, codes of a quantized weight, to which "
                f"nothing can be added; take the base model as it was before, in {', '.join(FLOATS)}"
            )

    def _applied(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = self._grown(weight, tensor)
        if weight not in self._updates:
            return tensor
        self.updated.add(weight)
        return self._updates[weight].applied(tensor).to(tensor.dtype)

    def _grown(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a weight with as many rows as the model has, which are more of embedding and head if tokens were
        added."""
        shape = self._names.shapes.get(weight)
        if not shape or shape[0] <= len(tensor) or shape[1:] != tensor.shape[1:]:
            return tensor
        result: torch.Tensor = added_tokens.grown(tensor, shape[0])
        self.more_parameters += result.numel() - tensor.numel()
        self.more_bytes += result.nbytes - tensor.nbytes
        return result

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._file[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
