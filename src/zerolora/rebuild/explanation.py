"""What explains a difference: the setting, the input, the code or the machine in which two receipts differ."""

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora.errors import shown
from zerolora.machine.identity import computing
from zerolora.publish.card import PIN
from zerolora.publish.record import is_measured, names_of, stage_of
from zerolora.rebuild.folder import settings_now
from zerolora.rebuild.original import Original
from zerolora.rebuild.rebuilt_products import RebuiltProduct
from zerolora.receipt import Receipt, parse, path_of

MACHINE = "train_resources.json"
SHOWN = 3
MISSING = "nothing"


def explained(original: Original, folder: Path, product: RebuiltProduct) -> str:
    """Return what explains that a product differs, by the receipts of its stage."""
    if product.note:
        return f"{product.path} {product.note}" if product.note.startswith("is ") else product.note
    was, now = original.receipts[product.stage], receipt_in(folder, product.stage)
    if now is None:
        return f"the rebuild has no receipt of {product.stage}"
    reasons = [*_params(product.stage, was, now), *_inputs(original, folder, was, now)]
    if reasons:
        return "; ".join(reasons[:SHOWN])
    others = [*_machines(original, folder), *_libraries(original)]
    same = f"settings, inputs and code of {product.stage} are the same"
    if others:
        return f"{same}; {'; '.join(others[:SHOWN])}"
    return f"{same}, and so is the machine, as far as it is recorded: what was recorded is not what they make"


def other_settings(original: Original, folder: Path) -> tuple[str, str] | None:
    """Return the first stage, not computed yet, whose settings are not the recorded ones, and how; None if there is
    none. Settings as `resolve` has written them in the folder."""
    names = names_of(original.receipts[f"train@{original.run}"]) | {"run": original.run}
    for stage, receipt in original.receipts.items():
        entry = stage_of(stage)
        own = {**names, **dict(zip(entry.wildcards, [stage.partition("@")[2]], strict=False))}
        now = settings_now(folder, stage, own, entry.settings)
        was = _decoded(receipt.params.get("settings", ""))
        if now is None or not isinstance(was, dict):
            continue
        if found := list(differences(was, now, entry.name)):
            return stage, "; ".join(found[:SHOWN])
    return None


def receipt_in(folder: Path, stage: str) -> Receipt | None:
    """Return the receipt of a stage in a rebuild's folder; None if it has not ended well there."""
    path = folder / path_of(stage)
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def differences(was: Any, now: Any, key: str) -> Iterator[str]:
    """Yield a text for each difference of two settings, as in `train.seed was 1 and is 2`."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now}):
            yield from differences(was.get(name, MISSING), now.get(name, MISSING), f"{key}.{name}")
    elif was != now:
        before, after = ("its default" if value == MISSING else shown(value) for value in (was, now))
        yield f"{key} was {before} and is {after}"


def machine_of(text: str) -> dict[str, Any]:
    """Return the machine in a text of train_resources.json; empty if an earlier version wrote it."""
    found = json.loads(text).get("machine", {}) if text else {}
    return found if isinstance(found, dict) else {}


def machines(original: Original, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machines of both trainings; of a rebuild that has not trained yet this one."""
    path = next(path for path in original.receipts[f"train@{original.run}"].outputs if path.endswith(f"/{MACHINE}"))
    own = folder / path
    device = original.receipts[f"train@{original.run}"].params.get("device")
    now = machine_of(own.read_text() if own.is_file() else "") or computing("cuda" if device == "cuda" else "cpu")
    return machine_of(original.contents.get(path, "")), now


def _params(stage: str, was: Receipt, now: Receipt) -> Iterator[str]:
    kind = stage_of(stage).name
    for name in sorted({*was.params, *now.params}):
        before, after = was.params.get(name, MISSING), now.params.get(name, MISSING)
        if before == after:
            continue
        if name == "code":
            yield f"the code of {kind} is another"
        elif name == "settings":
            yield from differences(_decoded(before), _decoded(after), kind)
        elif not Path(after).is_absolute():
            yield f"{name} of {kind} was {shown(before)} and is {shown(after)}"


def _inputs(original: Original, folder: Path, was: Receipt, now: Receipt) -> Iterator[str]:
    made = {path for each in original.receipts.values() for path in each.outputs}
    measured = {path for stage, each in original.receipts.items() for path in each.outputs if is_measured(stage, path)}
    for path in sorted({*was.inputs, *now.inputs}):
        if was.inputs.get(path) != now.inputs.get(path) and path not in measured | original.with_paths:
            yield f"its input {path} is another" if path not in made else f"{path}, which it read, differs, too"


def _machines(original: Original, folder: Path) -> Iterator[str]:
    was, now = machines(original, folder)
    if not was:
        yield "the machine of the original is not recorded"
        return
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield f"{name} was {shown(was.get(name, MISSING))} and is {shown(now.get(name, MISSING))}"


def _libraries(original: Original) -> Iterator[str]:
    """Yield the libraries of the recorded lock file that are installed here in another version."""
    if original.record is None:
        return
    for name, version in PIN.findall(original.record.lock):
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if re.sub(r"\+.*", "", here) != version:
            yield f"{name} was {version} and is {here}"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
