"""Merge the adapter into the base model, one weight file at a time, into a directory that plain transformers loads.

    zerolora merge --weights resources/weights/MODEL.json --adapter results/NAME/adapter
                   --place results/NAME/merged --output results/NAME/merged

Only one weight file of the base is in memory at a time, so a 70B model needs the memory of its largest shard. The
update is computed in fp32 and rounded once, to the dtype of the base weight.
"""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, read_json, staged_directory, write_json
from zerolora.log import result
from zerolora.manifest import WEIGHTS, is_weight, model_files
from zerolora.methods.lora import LoraMethod
from zerolora.progress import Progress
from zerolora.units import byte_size


def merge(base: Path, adapter: Path, output: Path, place: Path) -> None:
    """Write the merged model to directory `place` and its manifest to `output`/manifest.json.

    `place` is `output` itself if the weights are versioned; otherwise it is another directory, and only their hashes
    are versioned. Raises UserError if the adapter was trained on another base model.
    """
    with staged_directory(place) as staged:
        _write_merged(base, adapter, staged)
        files = describe(staged)
        manifest = {"path": str(place), "files": files}
        if place == output:
            write_json(staged / MANIFEST, manifest)
    if place != output:
        with staged_directory(output) as staged:
            write_json(staged / MANIFEST, manifest)
    size = byte_size(sum(file["bytes"] for file in files.values()))
    result(size if place == output else f"{size} in {place}")


def restore(base: Path, adapter: Path, manifest: Path) -> None:
    """Merge again if the weights that `manifest` describes are missing or differ in size.

    Raises UserError if the result differs from the manifest.
    """
    expected = read_json(manifest, "zerolora merge")
    place = Path(expected["path"])
    sizes = {name: file["bytes"] for name, file in expected["files"].items()}
    if not all((place / name).is_file() and (place / name).stat().st_size == sizes[name] for name in sizes):
        with staged_directory(place) as staged:
            _write_merged(base, adapter, staged)
            if describe(staged) != expected["files"]:
                raise UserError(f"{manifest}: base and adapter here merge to other weights; run the merge stage again")


def _write_merged(base: Path, adapter: Path, staged: Path) -> None:
    config = read_json(adapter / "adapter_config.json", "zerolora train")
    updates = LoraMethod.updates(adapter / "adapter_model.safetensors", config)
    for path in model_files(base):
        if not is_weight(path.name):
            shutil.copyfile(path, staged / path.name)
    merged = set()
    paths = sorted(base.glob(WEIGHTS))
    with Progress("file", len(paths)) as bar:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            for name in tensors.keys() & updates.keys():
                tensors[name] = _added(name, tensors[name], updates[name].tensor())
                merged.add(name)
            save_file(tensors, staged / path.name, metadata)
            bar.update()
    missing = sorted(updates.keys() - merged)
    if missing:
        raise UserError(f"{adapter}: the base has no {missing[0]}; this adapter was trained on another model")


def _added(name: str, weight: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    if update.shape != weight.shape:
        raise UserError(
            f"{name} is {list(weight.shape)} in the base and {list(update.shape)} in the adapter; "
            "this adapter was trained on another model"
        )
    return (weight.float() + update).to(weight.dtype)
