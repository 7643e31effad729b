"""The page of a real run, from the files that report reads of it (tests/finished_run/), as they are or edited."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conftest import ROOT

from zerolora.config.settings import ReportSettings
from zerolora.evaluate import held_out_preference
from zerolora.evaluate.intervals import wilson
from zerolora.files import read_json, write_json
from zerolora.report.report import report

FILES = Path(__file__).with_suffix("")
GPU = 8 * 2**30
"""Bytes of a GPU that a page is made for."""


def _update(figures: dict[str, float], content: dict[str, Any]) -> None:
    content |= figures


class FinishedRun:
    """A copy of the run's files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(FILES, folder, dirs_exist_ok=True)

    def edit(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change the content of a JSON file: in place, or to what `change` returns."""
        path = self.folder / name
        content = read_json(path, "tests")
        changed = change(content)
        write_json(path, content if changed is None else changed)

    def page(self, **settings: Any) -> Path:
        """Write the run's page and return its path."""
        run = self.folder / "default"
        report(
            ReportSettings.model_validate({"examples": 20, "strategy": "zero2", **settings}),
            "default",
            self.folder / "model",
            self.folder / "data/reference",
            run / "packing",
            run / "estimate.json",
            run / "zero.json",
            run / "render.json",
            self.folder / "base",
            run,
            ROOT / "config/config.yaml",
            ROOT / "envs/requirements.lock",
            None,
            run / "usage.json",
            run / "summary.json",
            run / "timings.json",
            run / "metrics/difference.json",
            self.folder / "compare/rows/default.json",
            run / "report.html",
        )
        return run / "report.html"

    def ask(self, task: str, base: Sequence[bool], tuned: Sequence[bool]) -> None:
        """Write what both models answered to a further task: which of their answers are right."""
        for folder, right in (("base", base), ("default", tuned)):
            low, high = wilson(sum(right), len(right))
            shares = {"accuracy": sum(right) / len(right), "accuracy_low": low, "accuracy_high": high}
            write_json(self.folder / folder / f"tasks/{task}.json", {"rows": len(right), **shares})
            answers = [{"place": f"row {index}", "right": each} for index, each in enumerate(right)]
            write_json(self.folder / folder / f"tasks/{task}.answers.json", answers)

    def of_pairs(self, chosen: float, rejected: float) -> None:
        """Let the held-out rows be pairs, whose chosen and rejected answers fine-tuning made likelier by so many nats,
        more or less. Before, every fourth pair was decided for the chosen answer."""
        for folder, (first, second) in (("base", (0.0, 0.0)), ("default", (chosen, rejected))):
            rows = read_json(self.folder / folder / "answers.json", "tests")
            for number, row in enumerate(rows):
                row["chosen_log_probability"] = -20 + first * (1 + number % 2 / 4)
                row["rejected_log_probability"] = -22.0 + 4 * (number % 4 > 0) + second
                row |= {"chosen_tokens": 10 + number % 5, "rejected_tokens": 12, "answer_tokens": 9 if first else 8}
            write_json(self.folder / folder / "answers.json", rows)
            metrics = "base" if folder == "base" else "default/metrics"
            self.edit(f"{metrics}/evaluate.json", partial(_update, held_out_preference.figures(rows)))

    def on_gpus(self) -> None:
        """Let the run have had two GPUs, whose memory, load, MFU and energy were measured."""
        self.edit("default/render.json", lambda each: each["slurm_resources"].update(gpus=2, gpu_bytes=GPU // 4))
        self.edit("default/estimate.json", lambda each: each["capacity"].update(gpu=GPU))
        figures = {"peak_gpu_bytes_worst_rank": GPU // 5, "mfu": 0.41}
        figures |= {"energy_joules": 7.2e6, "checkpoint_bytes": 30 * 2**20}
        self.edit("default/metrics/train_resources.json", lambda each: each.update(figures))
        of_gpu = {f"peak_gpu_bytes_{when}": GPU // 7 for when in ("loading", "generating")}
        for name in ("base", "default/metrics"):
            self.edit(f"{name}/evaluate_resources.json", lambda each: each.update(of_gpu))
        table = self.folder / "default/metrics/telemetry.csv"
        header, *rows = table.read_text().splitlines()
        assert header.endswith("gpu_percent,gpu_memory_bytes")
        table.write_text("\n".join([header, *(f"{row[:-1]}87,{GPU // 6}" for row in rows)]) + "\n")

    def ask_for_harm(self, text: str) -> None:
        """Put `text` where rows, names and messages of the user's own come onto the page."""

        def answers(rows: list[dict[str, Any]]) -> None:
            for index, row in enumerate(rows):
                row["category"] = text if index % 2 else "even"
            rows[0].update(question=text, expected=text, answer=text)

        for name in ("base/answers.json", "default/answers.json"):
            self.edit(name, answers)
        self.edit("default/estimate.json", lambda each: each["strategies"][8].update(why=text))
        self.edit("model/manifest.json", lambda each: each["source"].update(file=text))
        self.edit("data/reference/manifest.json", lambda each: each["read"].update({text: "0" * 64}))
        self.edit("data/reference/mask.json", lambda each: each["stop_tokens"].update({text: 1}))
