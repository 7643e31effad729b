"""Write the report page of a run from the outputs of the other stages.

zerolora report --settings JSON --run NAME … --usage results/NAME/usage.json --output results/NAME/report.html
"""

import subprocess
from pathlib import Path
from typing import Any

import jinja2

from zerolora.config.settings import ReportSettings
from zerolora.evaluate.difference import changed, difference
from zerolora.evaluate.gate import parse
from zerolora.files import MANIFEST, read_json, sha256, write_json, write_text
from zerolora.log import result
from zerolora.report.plots import length_histogram, loss_curve, memory_bars, step_times
from zerolora.report.row import row
from zerolora.report.show import before_and_after
from zerolora.report.summary import headline
from zerolora.report.usage import COLUMNS, table, usage
from zerolora.units import gib


def report(
    settings: ReportSettings,
    run: str,
    model: Path,
    data: Path,
    packing: Path,
    base: Path,
    results: Path,
    config: Path,
    lock: Path,
    accounted: dict[str, Any] | None,
    usage_file: Path,
    summary_file: Path,
    difference_file: Path,
    row_file: Path,
    output: Path,
) -> None:
    """Write the HTML page (self-contained), predicted and actual resource usage (usage.py), and the headline metrics
    (summary.py), what changed row by row (evaluate/difference.py), and the run's row in the comparison (row.py).

    `accounted` comes from Slurm's accounting, None without it. Raises UserError if an earlier stage's file is missing.
    """
    metrics = results / "metrics"
    before, after = (read_json(folder / "evaluate.json", "zerolora evaluate") for folder in (base, metrics))
    used = {
        "base": read_json(base / "evaluate_resources.json", "zerolora evaluate"),
        "merged": read_json(metrics / "evaluate_resources.json", "zerolora evaluate"),
        "train": read_json(metrics / "train_resources.json", "zerolora train"),
    }
    trained = read_json(metrics / "train.json", "zerolora train")
    estimate = read_json(results / "estimate.json", "zerolora estimate")
    render = read_json(results / "render.json", "zerolora render")
    train_usage = usage(render["slurm_resources"], used["train"], accounted)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerolora", "report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["gib"] = gib
    answers = (
        read_json(base / "answers.json", "zerolora evaluate"),
        read_json(results / "answers.json", "zerolora evaluate"),
    )
    compared = difference(before, after, answers)
    page = environment.get_template("page.html").render(
        run=run,
        evaluated=after.get("enabled", True),
        before=before,
        after=after,
        used=used,
        train=trained,
        stats=read_json(data / "stats.json", "zerolora prepare"),
        mask=read_json(data / "mask.json", "zerolora prepare"),
        packing=read_json(packing / "stats.json", "zerolora pack"),
        lengths=length_histogram(data / "lengths.csv"),
        estimate=estimate,
        render=render,
        usage={"columns": COLUMNS, "rows": table(train_usage), "jobs": train_usage.get("accounted_jobs")},
        zero=(results / "zero.json").read_text(encoding="utf-8"),
        loss=loss_curve(metrics / "loss.csv"),
        times=step_times(metrics / "telemetry.csv"),
        gpu_memory=memory_bars(estimate, "gpu"),
        host_memory=memory_bars(estimate, "host"),
        difference=compared,
        groups=[name.removesuffix(".difference") for name in compared if name.endswith(".difference")],
        changed=changed(*answers)[: settings.examples],
        gate={"fail_if": settings.fail_if, "failure": _verdict(settings.fail_if, compared)},
        examples=list(zip(*answers, strict=True))[: settings.examples],
        provenance=_provenance(run, model, data, results, config, lock),
    )
    write_json(usage_file, train_usage)
    write_json(summary_file, headline(before, compared, trained, used["train"], train_usage))
    write_json(difference_file, compared)
    refused = _refused(settings.fail_if, compared)
    write_json(row_file, row(results, compared, trained, used["train"], train_usage, refused))
    write_text(output, page)
    result(before_and_after(before, compared))


def _verdict(fail_if: str | None, figures: dict[str, Any]) -> str | None:
    """Return why the stage accept will fail, None if it will not."""
    if fail_if is None:
        return None
    try:
        return parse(fail_if).failure(figures)
    except KeyError as error:
        return f"there is no {error.args[0]}"


def _refused(fail_if: str | None, figures: dict[str, Any]) -> str | None:
    """Return why a run is not accepted, as the stage accept says it."""
    failure = _verdict(fail_if, figures)
    return f"evaluate.fail_if: {fail_if}: {failure}" if failure else None


def _provenance(run: str, model: Path, data: Path, results: Path, config: Path, lock: Path) -> dict[str, str]:
    base = read_json(model / MANIFEST, "zerolora fetch")
    prepared = read_json(data / "manifest.json", "zerolora prepare")
    weights = {name: file["sha256"] for name, file in base["files"].items() if name.endswith(".safetensors")}
    return {
        "run": run,
        "commit": _commit(),
        "base model": ", ".join(f"{key} {value}" for key, value in base["source"].items()),
        "base model's licence": base["license"],
        "base model's parameters": f"{base['parameters']:,}",
        **{f"base {name} sha256": digest for name, digest in weights.items()},
        **{f"data file {path} sha256": digest for path, digest in prepared["read"].items()},
        **{f"prepared {name} sha256": file["sha256"] for name, file in prepared["files"].items()},
        **_of_adapter(read_json(results / "adapter" / MANIFEST, "zerolora train")),
        "config sha256": sha256(config),
        "lock file sha256": sha256(lock),
    }


def _of_adapter(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of what was trained, and of each adapter that training went on from, the last one first."""
    found = {
        f"{name} sha256": file["sha256"] for name, file in manifest["files"].items() if name.endswith(".safetensors")
    }
    origin, before = manifest.get("from_adapter"), "goes on from"
    while origin:
        source = "".join(f", {key} {value}" for key, value in origin.get("source", {}).items())
        licence = f", {origin['license']}" if "license" in origin else ""
        found[before] = f"{origin['directory']} (sha256 {origin['sha256']}{source}{licence})"
        origin, before = origin.get("from_adapter"), f"{before}, which goes on from"
    return found


def _commit() -> str:
    """Return the checked-out commit, with a note if tracked files differ from it."""
    answers = []
    for command in (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return "not in a git repository"
        answers.append(result.stdout.strip())
    return answers[0] + (" with uncommitted changes" if answers[1] else "")
