"""The last lines of `make run`: each run's accuracy before and after, its report page, and the next steps."""

from collections.abc import Mapping
from pathlib import Path

from zerolora.files import read_json
from zerolora.report.run_settings import run_names, settings_of_run

REFERENCE = "data/reference.json"


def summary(results: Path) -> str:
    """Return a line for each run whose settings are in `results`/settings, and the next steps.

    Raises UserError if they are missing.
    """
    runs = run_names(results)
    width = max(map(len, runs))
    lines, pages = [], []
    for name in runs:
        files = (
            results / "base" / settings_of_run(results, name)["dataset"] / "evaluate.json",
            results / name / "metrics" / "evaluate.json",
        )
        if not all(path.is_file() for path in files):
            lines.append(f"{name:<{width}}  not evaluated yet")
            continue
        before, after = (read_json(path, "zerolora evaluate") for path in files)
        if (compared := results / name / "metrics/difference.json").is_file():
            after = read_json(compared, "zerolora report")
        pages.append(results / name / "report.html")
        lines.append(f"{name:<{width}}  {before_and_after(before, after)}  {pages[-1]}")
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
    return {data["path"] for data in read_json(results / "config.json", "zerolora resolve")["prepare"].values()} == {
        REFERENCE
    }


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the accuracies of base and fine-tuned model, or their losses if no row has a prompt.

    `after` is the fine-tuned model's evaluate.json or, with the interval of the difference, difference.json.
    """
    if not after.get("enabled", True):
        return "trained, not evaluated: evaluate.enabled is false, or no row is held out"
    if "accuracy" in after:
        text = f"accuracy {before['accuracy']:.3f} before, {after['accuracy']:.3f} after"
        if "difference_low" in after:
            text += f" ({after['difference']:+.3f}: {after['difference_low']:+.3f} to {after['difference_high']:+.3f})"
        return text
    return f"loss {before['loss']:.3f} before, {after['loss']:.3f} after"
