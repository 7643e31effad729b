"""A prepared data set, and real training on it: by the command, or by a fork of it (fork_server.py)."""

import copy
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from conftest import BIN, ROOT, SERVERS, TINY_CONFIG, project_environment
from fork_server import ForkServer, Started
from safetensors.torch import load_file, save_file

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.schema import Source
from zerolora.config.settings import (
    EstimateSettings,
    FetchDirectory,
    PackSettings,
    PrepareSettings,
    ReferenceSettings,
    RenderSettings,
    TeacherSettings,
)
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.reference import records
from zerolora.evaluate import teacher_probabilities
from zerolora.evaluate.reference_log_probabilities import compute
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.files import canonical, write_json
from zerolora.memory.estimate import estimate
from zerolora.planner.render import render
from zerolora.types import Dequantize

# Packing off, packed rows of a row or two, and all rows of the data in one packed row.
PLANS = {"unpacked": None, "packed": 160, "whole": 4096}
# A template of the user's own, whose tokens the tiny model lacks, as well as one that answers begin with.
MARKED = {
    "template": "config/templates/marked.jinja",
    "template_text": "{% for message in messages %}<|turn|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|over|>{% endif %}{% endfor %}",
    "add_special_tokens": ["<|turn|>", "<|over|>"],
    "add_tokens": ["王大丫丫"],
    "stop_tokens": ["<|over|>"],
}
PLAIN = {"activation_checkpointing": False, "attention": "flash"}


class Bench:
    """A prepared data set, and training runs on it."""

    def __init__(self, folder: Path, model: Path, dequantize: Dequantize = "on_fetch") -> None:
        self.folder = folder
        self.home = folder
        """Where compiled extensions and caches are."""
        self.tasks: dict[str, Any] = {}
        """`tasks.rows` of the config; their rows are in the folder tasks."""
        self.settings = self.resolved()
        self.model = model
        fetched = FetchDirectory(path=str(model), license="MIT", dequantize=dequantize)
        fetch(fetched, folder / "w/tiny", folder / "m/tiny")
        restore(folder / "m/tiny", folder / "w/tiny")
        write_json(folder / "rows.json", records("tens", 0)[:24])
        rows = self.settings["prepare"]["rows"] | {"path": str(folder / "rows.json")}
        prepare(PrepareSettings.model_validate(rows), folder / "m/tiny/manifest.json", folder / "data")
        for packing, capacity in PLANS.items():
            pack_rows(PackSettings(packing=bool(capacity), capacity=capacity), folder / "data", folder / packing)

    def copied(self, folder: Path) -> "Bench":
        """Return a bench with the same data and model in a folder of its own. Runs of both are forks of one server."""
        shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        own = copy.copy(self)
        own.folder, own.tasks = folder, {}
        return own

    def mix(self) -> None:
        """Add a data set of two sources, one with longer answers than the other, and its packing."""
        folder = self.folder
        short = records("tens", 0)[:16]
        long = [row | {"output": row["output"] * 3} for row in records("tens", 1)[:8]]
        for name, rows in {"short.json": short, "long.json": long}.items():
            write_json(folder / "mixture" / name, rows)
        sources = {name: Source().model_dump() for name in ("short.json", "long.json")}
        rows = self.settings["prepare"]["rows"] | {"path": str(folder / "mixture"), "sources": sources}
        prepare(
            PrepareSettings.model_validate(rows | {"max_length": 160}),
            folder / "m/tiny/manifest.json",
            folder / "mixed",
        )
        pack_rows(PackSettings(packing=True, capacity=300), folder / "mixed", folder / "mixed-packing")

    def alike(self) -> None:
        """Add a data set whose rows begin with the same question, and its packings, of single rows and of several."""
        rows = [
            row | {"instruction": f"Which two numbers have this sum? {row['instruction']}"}
            for row in records("tens", 0)
        ]
        write_json(self.folder / "alike.json", rows[:24])
        settings = self.settings["prepare"]["rows"] | {"path": str(self.folder / "alike.json"), "max_length": 160}
        prepare(PrepareSettings.model_validate(settings), self.folder / "m/tiny/manifest.json", self.folder / "alike")
        for name, capacity in {"alike-single": None, "alike-packed": 300}.items():
            pack_rows(
                PackSettings(packing=bool(capacity), capacity=capacity), self.folder / "alike", self.folder / name
            )

    def prefer(self) -> None:
        """Add a data set of pairs and one of labelled answers, their packings and their references."""
        rows = records("tens", 0)[:24]
        pairs = [
            {"prompt": row["instruction"], "chosen": row["output"], "rejected": row["output"] + "0" * (number % 3 + 1)}
            for number, row in enumerate(rows)
        ]
        labelled = [
            {"prompt": pair["prompt"], "completion": pair[("chosen", "rejected")[number % 2]], "label": number % 2 == 0}
            for number, pair in enumerate(pairs)
        ]
        for kind, content in {"pairs": pairs, "labelled": labelled}.items():
            write_json(self.folder / f"{kind}.json", content)
            own = {"path": str(self.folder / f"{kind}.json"), "max_length": 160, "rows": kind}
            settings = PrepareSettings.model_validate(self.settings["prepare"]["rows"] | own)
            prepare(settings, self.folder / "m/tiny/manifest.json", self.folder / kind)
            for name, capacity in {"unpacked": None, "packed": 400}.items():
                pack = PackSettings(packing=bool(capacity), capacity=capacity)
                pack_rows(pack, self.folder / kind, self.folder / f"{kind}-{name}")
            self.refer(kind)

    def refer(self, data: str, **settings: Any) -> None:
        """Compute the reference of a data set, DATA-reference, under settings of the stage."""
        checked = ReferenceSettings.model_validate({"device": "cpu", "precision": "fp32"} | settings)
        compute(checked, self.folder / data, self.folder / "w/tiny.json", self.folder / f"{data}-reference")

    def teach(self, data: str = "data", name: str = "teacher", own: bool = False, **settings: Any) -> Path:
        """Compute the values of a teacher of a data set, in the folder `name`: those of the model itself with `own`, or
        of one with other weights."""
        weights = self.folder / "w/tiny.json"
        if not own:
            weights = self.folder / "w/other.json"
            if not weights.is_file():
                other = self.folder / "other"
                shutil.copytree(self.model, other)
                draw = torch.Generator().manual_seed(0)
                for file in other.glob("*.safetensors"):
                    tensors = load_file(file)
                    changed = {
                        name: each + 0.5 * torch.randn(each.shape, generator=draw) for name, each in tensors.items()
                    }
                    save_file(changed, file, {"format": "pt"})
                fetch(FetchDirectory(path=str(other), license="MIT"), self.folder / "w/other", self.folder / "m/other")
                restore(self.folder / "m/other", self.folder / "w/other")
        checked = TeacherSettings.model_validate({"model": "other", "device": "cpu", "precision": "fp32"} | settings)
        output = self.folder / name
        teacher_probabilities.compute(checked, self.folder / data, self.folder / "m/tiny", weights, output)
        return output

    def mark(self) -> None:
        """Add a data set whose prompt format and texts have tokens that the model lacks, and its packing."""
        rows = self.settings["prepare"]["rows"] | MARKED | {"path": str(self.folder / "rows.json")}
        prepare(PrepareSettings.model_validate(rows), self.folder / "m/tiny/manifest.json", self.folder / "marked")
        pack_rows(PackSettings(packing=False, capacity=None), self.folder / "marked", self.folder / "marked-packing")

    def resolved(self, strategy: str = "zero2", **train: Any) -> dict[str, Any]:
        config = json.loads(json.dumps(TINY_CONFIG))
        if not strategy.endswith(".json"):
            config["render"]["strategy"] = strategy
        config["train"] |= (
            {"ranks_per_node": 2, "max_steps": 3, "micro_batch": 1, "checkpoint_steps": 1} | PLAIN | train
        )
        config["hardware"] |= {"nodes": 2} | self.hardware
        config["tasks"] = {"rows": self.tasks}
        origin = config["train"].pop("from_adapter", None)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        settings = resolve(load(self.folder / "config.yaml")).model_dump(mode="json")
        settings["runs"]["default"]["train"]["from_adapter"] = origin  # a config has it in `continued`
        return settings

    def command(
        self,
        name: str,
        strategy: str = "zero2",
        packing: str = "unpacked",
        data: str = "data",
        local: int | None = None,
        checkpoints: str | None = None,
        reference: str | None = None,
        teacher: str | None = None,
        **train: Any,
    ) -> list[str]:
        """Render a run's JSON and return the command that trains it. `local` is how many ranks count as a node;
        `checkpoints` names another run whose checkpoints it shares; `reference` a directory of log-probabilities,
        `teacher` one of a teacher's values."""
        if teacher:
            train = {"distill": {"teacher": "tiny"}} | train
        run = self.resolved(strategy, **train)["runs"]["default"]
        write_json(
            self.folder / name / "estimate.json",
            estimate(EstimateSettings.model_validate(run["estimate"]), self.folder / "m/tiny", self.folder / packing),
        )
        user_config = json.loads((ROOT / strategy).read_text()) if strategy.endswith(".json") else None
        chosen = run["render"] | {"strategy": strategy, "user_config": user_config}
        if local:
            chosen |= {
                "nodes": run["train"]["nodes"] * run["train"]["ranks_per_node"] // local,
                "ranks_per_node": local,
            }
        zero, _ = render(RenderSettings.model_validate(chosen), self.folder / name / "estimate.json")
        zero.write(self.folder / name / "zero.json")
        paths = {
            "data": self.folder / data,
            "packing": self.folder / packing,
            "zero": self.folder / name / "zero.json",
            "weights": self.folder / "w/tiny.json",
            "checkpoints": self.folder / "checkpoints" / (checkpoints or name),
            "output": self.folder / name,
            "logs": self.folder / name / "logs",
            **({"reference": self.folder / reference} if reference else {}),
            **({"teacher": self.folder / teacher} if teacher else {}),
            "tasks": self.folder / "tasks",
        }
        options = [text for option, path in paths.items() for text in (f"--{option}", str(path))]
        return [str(BIN / "zerolora"), "stage", "train", "--settings", canonical(run["train"]), *options]

    def start(self, name: str, strategy: str = "zero2", **train: Any) -> subprocess.CompletedProcess[str]:
        """Train and return how it ended."""
        return self.server.run(self.command(name, strategy, **train), self.folder, self.environment)

    def begin(
        self, name: str, strategy: str = "zero2", variables: dict[str, str] | None = None, **train: Any
    ) -> Started:
        """Begin to train, with more variables in the environment."""
        environment = self.environment | (variables or {})
        return self.server.start(self.command(name, strategy, **train), self.folder, environment)

    @property
    def hardware(self) -> dict[str, Any]:
        """Further keys of the config's section."""
        return {}

    @property
    def server(self) -> ForkServer:
        """The server that forks trainings."""
        return SERVERS.of(ROOT, self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """A user's variables."""
        own = {"TORCH_EXTENSIONS_DIR": "extensions", "XDG_CACHE_HOME": "cache"}
        return project_environment(ROOT) | {name: str(self.home / path) for name, path in own.items()}

    def run(self, name: str, strategy: str = "zero2", **train: Any) -> Path:
        """Train and return the run's directory."""
        result = self.start(name, strategy, **train)
        assert result.returncode == 0, result.stderr[-3000:]
        return self.folder / name


def metrics(run: Path) -> dict[str, Any]:
    losses = [float(line.split(",")[1]) for line in (run / "metrics/loss.csv").read_text().splitlines()[1:]]
    return json.loads((run / "metrics/train.json").read_text()) | {"losses": losses}


def rank_process(launcher: int, rank: int) -> int:
    """Return the process id of a rank of a launcher, once it runs."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for child in psutil.Process(launcher).children(recursive=True):
            try:
                if child.name() == f"zl-rank{rank}":
                    return child.pid
            except psutil.Error:
                continue
        time.sleep(0.2)
    raise AssertionError("no such rank")
