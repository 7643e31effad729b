"""Accuracy before and after, of every run, in a terminal."""

from pathlib import Path

from zerolora.files import read_json


def table(results: Path) -> str:
    """Return one line for each run of `results`/config.json that has been evaluated."""
    runs = read_json(results / "config.json", "zerolora resolve")["runs"]
    width = max(len("run"), *map(len, runs))
    lines = [f"{'run':<{width}}  accuracy before  after  report"]
    for name, run in runs.items():
        files = (
            results / "base" / run["dataset"] / "evaluate.json",
            results / name / "metrics" / "evaluate.json",
        )
        if not all(path.is_file() for path in files):
            lines.append(f"{name:<{width}}  not evaluated yet")
            continue
        before, after = (read_json(path, "zerolora evaluate") for path in files)
        page = results / name / "report.html"
        if "accuracy" in after:
            lines.append(f"{name:<{width}}  {before['accuracy']:>15.3f}  {after['accuracy']:.3f}  {page}")
        else:
            lines.append(f"{name:<{width}}  nothing is asked; loss {before['loss']:.3f} -> {after['loss']:.3f}  {page}")
    return "\n".join(lines)
