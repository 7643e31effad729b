"""Add the adapter to the base model, file by file, and write a directory that plain transformers loads.

    zerolora merge --weights resources/weights/MODEL.json --adapter results/NAME/adapter
                   --place results/NAME/merged --output results/NAME/merged

One weight file of the base is in memory at a time, so a 70B model needs the memory of its largest shard. The
update is computed in fp32 and rounded once to the base's own type.
"""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, read_json, staged_directory, write_json
from zerolora.manifest import WEIGHTS, is_weight

PREFIX = "base_model.model."


def merge(base: Path, adapter: Path, output: Path, place: Path) -> None:
    """Write base + adapter to directory `place` and what it holds to `output`/manifest.json.

    `place` may be `output` itself (the weights are versioned) or lie elsewhere (only their hashes are).
    Raises UserError if the adapter does not belong to this base.
    """
    with staged_directory(place) as staged:
        _write_merged(base, adapter, staged)
        manifest = {"path": str(place), "files": describe(staged)}
        if place == output:
            write_json(staged / MANIFEST, manifest)
    if place != output:
        with staged_directory(output) as staged:
            write_json(staged / MANIFEST, manifest)


def restore(base: Path, adapter: Path, manifest: Path) -> None:
    """Merge again where the weights that `manifest` describes are missing or of another size.

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
    updates = _factors(adapter / "adapter_model.safetensors")
    # rsLoRA scales by alpha / sqrt(r) (arXiv 2312.03732), LoRA by alpha / r.
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for path in sorted(base.iterdir()):
        if path.is_file() and not is_weight(path.name) and path.name != MANIFEST:
            shutil.copyfile(path, staged / path.name)
    merged = set()
    for path in tqdm(sorted(base.glob(WEIGHTS)), desc="merge", unit="file", disable=None):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        for name in tensors.keys() & updates.keys():
            update = updates[name]["B"].float() @ updates[name]["A"].float() * scale
            # GPT-2's Conv1D keeps its weight as [inputs, outputs].
            tensors[name] = _added(name, tensors[name], update.T if config.get("fan_in_fan_out") else update)
            merged.add(name)
        save_file(tensors, staged / path.name, metadata)
    missing = sorted(updates.keys() - merged)
    if missing:
        raise UserError(f"{adapter}: the base has no {missing[0]}; this adapter was trained on another model")


def _factors(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return {base weight name: {"A": [r, in], "B": [out, r]}} of an adapter file in peft's format."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path).items():
        module, _, rest = name.removeprefix(PREFIX).partition(".lora_")
        factor = rest.split(".")[0]
        if factor not in ("A", "B"):
            raise UserError(f"{path}: {name} is no LoRA factor; merge it with peft's merge_and_unload")
        factors.setdefault(f"{module}.weight", {})[factor] = tensor
    return factors


def _added(name: str, weight: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    if update.shape != weight.shape:
        raise UserError(
            f"{name} is {list(weight.shape)} in the base and {list(update.shape)} in the adapter; "
            "this adapter was trained on another model"
        )
    return (weight.float() + update).to(weight.dtype)
