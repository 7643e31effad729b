"""Compares what a rebuild made with what was recorded, product by product, in the order of the stages."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerolora.files import sha256
from zerolora.publish.record import checkpoints_of, digest_of, digest_of_file, is_measured
from zerolora.rebuild.original import Original
from zerolora.rebuild.other_rows import first_other_row
from zerolora.train.checkpoint.names import STEP

ORDER = "order of the rows"
LOSSES, METRICS = "loss.csv", "train.json"


@dataclass(frozen=True)
class RebuiltProduct:
    """A file, or another thing that can be compared, of a stage."""

    path: str
    stage: str
    original: str | None
    """sha256, or the digest of a checkpoint or of the order; None if it is missing."""
    rebuilt: str | None
    note: str = ""
    """How it was compared, if not by its bytes, or why it differs."""

    @property
    def equal(self) -> bool:
        return self.original is not None and self.original == self.rebuilt

    def as_json(self) -> dict[str, Any]:
        """Return the entry of rebuild.json."""
        return {**asdict(self), "equal": self.equal}


def damaged(original: Original) -> Iterator[RebuiltProduct]:
    """Yield the files at hand that are not what the record says of them, before anything is computed."""
    for stage, receipt in original.receipts.items():
        for path, digest in receipt.outputs.items():
            file = original.find(path)
            if file is None or path in original.with_paths or path in original.pushed:
                continue
            if (found := sha256(file)) != digest:
                yield RebuiltProduct(path, stage, found, digest, f"is not what {stage} wrote")
    yield from _not_as_listed(original)
    for path, file in original.pushed.items():
        listed = original.listed[file.name]["sha256"]
        stage = f"{'train' if '/adapter/' in path else 'merge'}@{original.run}"
        recorded = original.receipts[stage].outputs.get(path)
        now = sha256(file) if file.is_file() else None
        if recorded and path not in original.with_paths and recorded != listed:
            yield RebuiltProduct(path, stage, now, recorded, f"is not what {stage} wrote, by its receipt")


def _not_as_listed(original: Original) -> Iterator[RebuiltProduct]:
    """Yield the files of a push that are not those of its list."""
    stage = f"train@{original.run}"
    paths = {file: path for path, file in original.pushed.items()}
    for name, entry in original.listed.items():
        file = original.directory / name
        if (now := sha256(file) if file.is_file() else None) != entry["sha256"]:
            path = paths.get(file, name)
            yield RebuiltProduct(path, stage, now, entry["sha256"], "is not the file that the push lists")


def compared(original: Original, folder: Path, until: str | None = None) -> Iterator[RebuiltProduct]:
    """Yield the products of all stages, or of those before `until`."""
    for stage, receipt in original.receipts.items():
        if stage == until:
            return
        if stage == f"train@{original.run}":
            yield from _of_training(original, folder, stage)
        for path, digest in receipt.outputs.items():
            if is_measured(stage, path):
                continue
            own = folder / path
            if path in original.with_paths:
                if pushed := original.pushed.get(path):
                    yield _apart_from_paths(path, stage, pushed, own)
                continue
            yield RebuiltProduct(path, stage, digest, sha256(own) if own.is_file() else None)
        if stage == f"merge@{original.run}":
            yield from _of_pushed_merge(original, folder, stage)


def not_compared(original: Original) -> list[str]:
    """Return the products that name directories of the recording machine, and are not pushed."""
    return sorted(original.with_paths - original.pushed.keys())


def _of_pushed_merge(original: Original, folder: Path, stage: str) -> Iterator[RebuiltProduct]:
    """Yield the files of a pushed merged model that are no results of the stage (merge.version: false)."""
    for path, file in original.pushed.items():
        if path not in original.receipts[stage].outputs and "/merged/" in path:
            own = folder / path
            yield RebuiltProduct(path, stage, sha256(file), sha256(own) if own.is_file() else None)


def _of_training(original: Original, folder: Path, stage: str) -> Iterator[RebuiltProduct]:
    """Yield the order of the rows, and each checkpoint that both have."""
    metrics = next(path for path in original.receipts[stage].outputs if path.endswith(f"/{METRICS}"))
    was, now = json.loads(original.contents.get(metrics, "{}")), _json(folder / metrics)
    if "order" in was:
        yield RebuiltProduct(ORDER, stage, was["order"], now.get("order"))
    rebuilt = checkpoints_of(original.run, folder / "work")
    for step in sorted(rebuilt.keys() & (original.checkpoint_files.keys() | original.checkpoint_digests.keys())):
        path = f"work/checkpoints/{original.run}/step-{step:08d}.safetensors"
        own = digest_of_file(rebuilt[step])
        if file := original.checkpoint_files.get(step):
            digest, note = digest_or_fault(file)
            yield RebuiltProduct(path, stage, digest, own, note)
        else:
            yield RebuiltProduct(path, stage, original.checkpoint_digests[step], own)


def digest_or_fault(path: Path) -> tuple[str, str]:
    """Return the digest of a checkpoint's state; of a damaged one that of its bytes, with what is wrong."""
    from zerolora.train.checkpoint.format import CorruptCheckpoint, read

    try:
        return digest_of(read(path)[1]), ""
    except CorruptCheckpoint as error:
        return sha256(path), str(error)


def _apart_from_paths(path: str, stage: str, pushed: Path, own: Path) -> RebuiltProduct:
    """Return the product of a JSON file that names a directory of the machine: equal if all else is."""
    was, now = _json(pushed), _json(own)
    if without_folders(was) == without_folders(now):
        digest = sha256(own)
        return RebuiltProduct(path, stage, digest, digest, "apart from paths of the machine")
    return RebuiltProduct(path, stage, sha256(pushed), sha256(own) if own.is_file() else None)


def without_folders(value: Any) -> Any:
    """Return a JSON value with only the last part of each path in it."""
    match value:
        case str() if value.startswith(("/", "./", "../", "~")):
            return Path(value).name
        case dict():
            return {key: without_folders(each) for key, each in value.items()}
        case list():
            return [without_folders(each) for each in value]
    return value


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def place_of_difference(original: Original, folder: Path, product: RebuiltProduct) -> dict[str, Any]:
    """Return where a product first differs, as far as both are at hand: the optimizer step, the row, the tensor."""
    found: dict[str, Any] = {"path": product.path, "stage": product.stage}
    file, own = original.find(product.path), folder / product.path
    if product.stage == f"train@{original.run}":
        # A checkpoint may differ before its losses do.
        checkpoint = STEP.fullmatch(Path(product.path).name)
        steps = [first_other_step(original, folder), int(checkpoint[1]) if checkpoint else None]
        found["step"] = min((step for step in steps if step is not None), default=None)
    if file and own.is_file():
        if product.path.endswith(".arrow"):
            found["row"] = first_other_row(file, own, table=True)
        if product.path.endswith(".safetensors"):
            found["tensor"] = first_other_tensor(file, own)
    return {key: value for key, value in found.items() if value is not None}


def losses(text: str) -> list[dict[str, str]]:
    """Return the rows of loss.csv."""
    return list(csv.DictReader(io.StringIO(text)))


def loss_tables(original: Original, folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the losses of each step of both."""
    path = next(path for path in original.receipts[f"train@{original.run}"].outputs if path.endswith(f"/{LOSSES}"))
    own = folder / path
    return losses(original.contents.get(path, "")), losses(own.read_text(encoding="utf-8") if own.is_file() else "")


def first_other_step(original: Original, folder: Path) -> int | None:
    """Return the first optimizer step whose figures differ; None if none does."""
    was, now = loss_tables(original, folder)
    for one, other in zip(was, now, strict=False):
        if one != other:
            return int(one["step"])
    return min(len(was), len(now)) + 1 if len(was) != len(now) else None


def first_other_tensor(one: Path, other: Path) -> str | None:
    """Return the name of the first tensor in which two safetensors files differ; None if none does."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
            names: list[str] = sorted({*first.keys(), *second.keys()})
            both = {*first.keys()} & {*second.keys()}
            for name in names:
                if name not in both or not _same(first.get_tensor(name), second.get_tensor(name)):
                    return name
    except (SafetensorError, OSError):
        pass
    return None


def _same(one: Any, other: Any) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def figures(original: Original, folder: Path, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the figures in a JSON product of both."""
    return json.loads(original.contents.get(path, "{}")), _json(folder / path)
