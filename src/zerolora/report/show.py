"""The last lines of `make run`: each run's accuracy before and after, its report page, and the next steps."""

import math
from collections.abc import Mapping
from pathlib import Path

from zerolora.evaluate.free_form import BITS, FREE_FORM
from zerolora.evaluate.held_out_preference import less_likely
from zerolora.files import read_json
from zerolora.report.run_settings import run_names, settings_of_run

MOST, BEST = 8, 5
"""Runs of which each has a line, and of more those that have one."""
REFERENCE = "data/reference.json"


def summary(results: Path) -> str:
    """Return a line for each run whose settings are in `results`/settings, of many those of lowest loss, and the next
    steps.

    Raises UserError if they are missing.
    """
    runs = run_names(results)
    width = max(map(len, runs))
    lines, pages = [], []
    evaluated: list[tuple[float, str, Path]] = []
    for name in runs:
        files = (
            results / "base" / settings_of_run(results, name)["dataset"] / "evaluate.json",
            results / name / "metrics" / "evaluate.json",
        )
        if not all(path.is_file() for path in files):
            lines.append(f"{name:<{width}}  not evaluated yet")
            continue
        before, after = (read_json(path, "zerolora stage evaluate") for path in files)
        if (compared := results / name / "metrics/difference.json").is_file():
            after = read_json(compared, "zerolora stage report")
        pages.append(results / name / "report.html")
        lines.append(f"{name:<{width}}  {before_and_after(before, after)}  {pages[-1]}")
        evaluated.append((after.get("loss", math.inf), lines[-1], pages[-1]))
    if len(lines) > MOST and evaluated:
        best = sorted(evaluated)[:BEST]
        lines, pages = [line for _, line, _ in best], [page for *_, page in best]
        missing = len(runs) - len(evaluated)
        which = f"{len(best)} of lowest loss of {len(runs)} runs" + (
            f", {missing} not evaluated yet" if missing else ""
        )
        lines.append(f"the {which}; `zerolora show` has all")
    if pages:
        lines += ["", f"Next: open {pages[0]}: answers, memory, provenance."]
        if _is_tutorial(results):
            lines.append(
                "Then train on your own rows: zerolora init --model DIRECTORY --data FILE --force, and run again."
            )
    return "\n".join(lines)


def _is_tutorial(results: Path) -> bool:
    """Return whether the data are those of the reference task alone."""
    if not (results / "config.json").is_file():
        return False
    prepared = read_json(results / "config.json", "zerolora stage resolve")["prepare"]
    return {data.get("path") for data in prepared.values()} == {REFERENCE}  # selections have no path


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the accuracies of base and fine-tuned model, those of preferences first; their losses if no row has a
    prompt, and before the accuracies if the answers are free-form.

    `after` is the fine-tuned model's evaluate.json or, with the interval of the difference, difference.json.
    """
    if not after.get("enabled", True):
        return "trained, not evaluated: evaluate.enabled is false, or no row is held out"
    shares = {"preference_accuracy": "preference_accuracy_difference", "accuracy": "difference"}
    texts = [_change(before, after, *each) for each in shares.items() if each[0] in after]
    if after.get(FREE_FORM):
        exact = texts.pop().replace("accuracy", "exact match", 1)
        texts += [_losses(before, after), *([_bits(before, after)] if BITS in before and BITS in after else []), exact]
    if answers := less_likely(after):
        texts.append(f"the {answers} answers became less likely")
    return ", ".join(texts or [_losses(before, after)])


def _losses(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return f"loss {before['loss']:.3f} before, {after['loss']:.3f} after"


def _bits(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return f"bits a byte {before[BITS]:.3f} before, {after[BITS]:.3f} after"


def _change(before: Mapping[str, float], after: Mapping[str, float], name: str, difference: str) -> str:
    text = f"{name.replace('_', ' ')} {before[name]:.3f} before, {after[name]:.3f} after"
    if f"{difference}_low" not in after:
        return text
    change, low, high = (after[f"{difference}{end}"] for end in ("", "_low", "_high"))
    return f"{text} ({change:+.3f}: {low:+.3f} to {high:+.3f})"
