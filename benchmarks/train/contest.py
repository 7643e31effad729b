"""Shared code of the contests: model and rows, training by zerolora and by other trainers, rounds, results.

A *contestant* is a name and a function that trains once and returns a Run. Each training runs in processes of its own,
so that its memory peak is its own. Contestants take turns within one run of a script and are compared round by round,
since the speed of the machine drifts.
"""

import argparse
import contextlib
import csv
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import psutil
import torch
import yaml
from chat_rows import LONGEST, document_words, write_chat
from measuring import PACKAGES, RESULTS, ROOT, by_round, machine, parser_of, random_model, turns, wait
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import (
    EstimateSettings,
    FetchDirectory,
    PackSettings,
    PrepareSettings,
    RenderSettings,
    TrainingPlan,
    TrainSettings,
)
from zerolora.data.pack import pack_rows
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import open_split
from zerolora.data.reference import records
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.files import canonical, read_json, write_json
from zerolora.memory.estimate import estimate
from zerolora.planner.render import render
from zerolora.train.engines.engine import DTYPES
from zerolora.train.feed import Batches
from zerolora.train.launch.topology import topology
from zerolora.train.telemetry.stopwatch import PARTS

MODEL = ROOT / "resources/weights/smollm2-135m-instruct"
TOKENIZER = ROOT / "resources/models/smollm2-135m-instruct"
OPPONENTS = Path(__file__).resolve().parent / "opponents.py"
LORA = {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear"}
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
TRAIN = {
    "learning_rate": 2e-4, "schedule": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0, "gradient_clipping": 1.0,
    "seed": 42,
}  # fmt: skip
"""The training settings of all contestants, unless an experiment has its own."""
VALIDATED = 8  # rows, where validation is not measured
LONGEST_SECONDS = 3600  # of one training; only a hang takes this long


@dataclass
class Step:
    """One optimizer step, of all ranks together."""

    seconds: float
    """From the end of the previous step to its end."""
    tokens: int
    """Real tokens: padding is not counted."""
    supervised: int
    """Tokens with a loss."""
    loss: float
    """Mean over the supervised tokens."""
    parts: dict[str, float] = field(default_factory=dict)
    """Ours only: seconds of PARTS on rank 0."""
    flops: float = 0.0
    """Ours only: FLOPs that a rank needs at least (planner/cost.py, useful_flops)."""
    communicated: float = 0.0
    """Ours only: bytes of the full buffers of one rank's collectives."""


@dataclass
class Run:
    """The steps and memory peaks of one training."""

    steps: list[Step]
    peak_host_bytes: int
    """Of all ranks together."""
    peak_gpu_bytes: int
    """Of the worst rank; 0 on CPU."""
    sent: dict[str, float] = field(default_factory=dict)
    """Ours only: bytes of full buffers a step, by collective, as in all_reduce_bytes_per_step."""

    def tokens_per_second(self, warm_up: int) -> float:
        """Return real tokens a second over the steps after `warm_up`."""
        steps = self.steps[warm_up:]
        return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


# Rows and model


class Task:
    """A model and the rows prepared for it, which all contestants share."""

    def __init__(self, folder: Path, model: Path, device: str, prepared: dict[str, Any]) -> None:
        """`prepared`: the config's section for the rows, as in {"path": "rows.json", "max_length": 2048, …}."""
        self.folder, self.model, self.device = folder, model, device
        self.prepared = {"model": "model", **prepared}
        self.data = folder / "data"
        directory = FetchDirectory(path=str(model), license="Apache-2.0")
        fetch(directory, folder / "weights/model", folder / "models/model")
        restore(folder / "models/model", folder / "weights/model")
        settings = self.resolved({}, {}, {})["prepare"]["rows"]
        prepare(PrepareSettings.model_validate(settings), folder / "models/model/manifest.json", self.data)
        self.stats = read_json(self.data / "stats.json", "zerolora stage prepare")

    def resolved(self, train: dict[str, Any], pack: dict[str, Any], render: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of every stage, resolved from a user's config."""
        config = {
            "hardware": hardware(self.device, train.get("ranks_per_node", 1)),
            "fetch": {"directory": {"model": {"path": str(self.model), "license": "Apache-2.0"}}},
            "prepare": {"rows": self.prepared},
            "pack": pack,
            "render": render,
            "train": {"lora": LORA, "activation_checkpointing": False, **train},
            "runs": {"default": {"dataset": "rows"}},
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return resolve(load(path)).model_dump(mode="json")

    def ours(
        self, name: str, train: dict[str, Any], pack: dict[str, Any], strategy: str = "auto", threads: str = ""
    ) -> "Ours":
        """Return zerolora as a contestant: packed, rendered, ready to train. Without `threads` of a rank, the ranks
        use all cores."""
        return Ours(self, self.folder / name, train, pack, strategy, threads or threads_of(train["ranks_per_node"]))


@contextlib.contextmanager
def reference(options: argparse.Namespace, validated: int | None = VALIDATED) -> Iterator[Task]:
    """Yield the reference task for the model of the options, in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield reference_task(folder, model_of(options, folder), options, validated)


def reference_task(
    folder: Path, model: Path, options: argparse.Namespace, validated: int | None = VALIDATED, rule: Any = "tens"
) -> Task:
    """Return the reference task, prepared as in config/config.yaml but for the longest row and, unless None, the
    number of validation rows."""
    write_json(folder / "rows.json", records(rule, 42))
    prepared = resolve(load(ROOT / "config/config.yaml")).model_dump(mode="json")["prepare"]["reference"]
    wanted = {name: prepared[name] for name in ("template", "split", "seed")} | {"path": str(folder / "rows.json")}
    if validated is not None:
        wanted["split"] = {**wanted["split"], "validation": validated}
    return Task(folder, model, options.device, wanted | {"max_length": options.max_length})


def chat_task(
    folder: Path,
    model: Path,
    device: str,
    counts: Mapping[str, int],
    max_length: int,
    *,
    longest: int = LONGEST,
    system: int = 0,
    **prepared: Any,
) -> Task:
    """Return a chat set of `counts` conversations by split; `longest` and `system`: as in write_chat."""
    (folder / "rows").mkdir(parents=True)
    for number, (split, count) in enumerate(counts.items()):
        write_chat(folder / f"rows/{split}.jsonl", count, seed=number, longest=longest, system=system)
    return split_task(folder, model, device, counts, max_length, **prepared)


def split_task(folder: Path, model: Path, device: str, splits: Iterable[str], max_length: int, **prepared: Any) -> Task:
    """Return the rows of `folder`/rows, a file for each split, so that all contestants train the same; `prepared`: more
    of the config's section for them."""
    section = {
        "path": str(folder / "rows"), "max_length": max_length, "split": {"validation": 0, "test": 0},
        "sources": {f"{split}.jsonl": {"split": split} for split in splits},
    }  # fmt: skip
    return Task(folder, model, device, section | prepared)


def training_settings() -> dict[str, Any]:
    """Return the settings of `train` of the embedded default, without its device."""
    train = resolve(load(ROOT / "config/config.yaml")).model_dump(mode="json")["runs"]["default"]["train"]
    return {name: value for name, value in train.items() if name != "device"}


class Ours:
    """Training by `zerolora stage train`."""

    def __init__(
        self, task: Task, folder: Path, train: dict[str, Any], pack: dict[str, Any], strategy: str, threads: str
    ) -> None:
        self.folder, self.task, self.threads = folder, task, threads
        run = task.resolved(train, pack, {"strategy": strategy})["runs"]["default"]
        self.render, estimated = RenderSettings.model_validate(run["render"]), folder / "estimate.json"
        pack_rows(PackSettings.model_validate(run["pack"]), task.data, folder / "packing")
        write_json(
            estimated,
            estimate(
                EstimateSettings.model_validate(run["estimate"]), task.folder / "models/model", folder / "packing"
            ),
        )
        self.zero, _ = render(self.render, estimated)
        self.zero.write(folder / "zero.json")
        self.settings = {**run["train"], "resume": "never"}
        self.ranks = run["train"]["ranks_per_node"]

    def command(self) -> list[str]:
        """Return the command of `zerolora stage train`."""
        return [sys.executable, "-m", "zerolora", "stage", "train", *self.arguments()]

    def arguments(self) -> list[str]:
        """Return the arguments of `zerolora stage train`, which its ranks get too."""
        paths = {
            "data": self.task.data,
            "packing": self.folder / "packing",
            "zero": self.folder / "zero.json",
            "weights": self.task.folder / "weights/model.json",
            "checkpoints": self.folder / "checkpoints/run",
            "output": self.folder / "run",
            "logs": self.folder / "logs",
        }
        options = [text for option, path in paths.items() for text in (f"--{option}", str(path))]
        return ["--settings", canonical(self.settings), *options]

    def train(self) -> Run:
        """Train once."""
        finished([self.command()], [{"OMP_NUM_THREADS": self.threads}], self.folder)
        return self.read()

    def read(self) -> Run:
        """Return the steps and peaks of the training that has ended."""
        metrics = self.folder / "run/metrics"
        resources = read_json(metrics / "train_resources.json", "train")
        with (metrics / "telemetry.csv").open(newline="") as file:
            rows = [{name: float(value or 0) for name, value in row.items()} for row in csv.DictReader(file)]
        return Run(
            [
                Step(
                    seconds=row["seconds"] + row["between_seconds"],
                    tokens=int(row["tokens"]),
                    supervised=supervised,
                    loss=row["loss"],
                    parts={part: row[f"{part}_seconds"] for part in PARTS},
                    flops=row["tflops_per_second"] * 1e12 * row["seconds"],
                    communicated=row["communication_bytes"],
                )
                for row, supervised in zip(rows, self._supervised(), strict=True)
            ],
            resources["peak_host_bytes_all_ranks"],
            resources["peak_gpu_bytes_worst_rank"],
            {name: resources[name] for name in resources if name.endswith("_bytes_per_step")},
        )

    def _supervised(self) -> list[int]:
        """Return the supervised tokens of every step, of all ranks."""
        plan = open_plan(self.folder / "packing/train.arrow")
        rows = open_split(self.task.data, "train")
        settings = TrainSettings.model_validate(self.settings)
        training = TrainingPlan.of(settings, self.zero.choice)
        batches = Batches(rows, plan, training, 0, self.ranks)
        return [batches.at(step)[1]["supervised token"] for step in range(batches.steps)]


def hardware(device: str, ranks: int) -> dict[str, Any]:
    """Return this machine as the config's `hardware`."""
    memory = {"device": device, "host_memory": f"{psutil.virtual_memory().total // 2**30}GiB"}
    if device == "cpu":
        return memory
    properties = torch.cuda.get_device_properties(0)
    return memory | {
        "gpus_per_node": ranks,
        "gpu_memory": f"{properties.total_memory // 2**30}GiB",
        "compute_capability": float(f"{properties.major}.{properties.minor}"),
    }


# Others


def opponent(kind: str, folder: Path, settings: dict[str, Any], ranks: int) -> Run:
    """Train once with another trainer (opponents.py), in `ranks` processes."""
    own = {"OMP_NUM_THREADS": threads_of(ranks)} | ({"DS_ACCELERATOR": "cpu"} if settings["device"] == "cpu" else {})
    result = in_ranks([sys.executable, str(OPPONENTS), kind, str(folder)], folder, settings, ranks, own)
    steps = [
        Step(
            seconds=after - before,
            tokens=sum(each["tokens"][number] for each in result),
            supervised=(supervised := sum(each["supervised"][number] for each in result)),
            loss=sum(each["losses"][number] for each in result) / supervised,
        )
        for number, (before, after) in enumerate(itertools.pairwise(result[0]["ends"]))
    ]
    return Run(
        steps,
        sum(each["peak_host_bytes"] for each in result),
        max(each["peak_gpu_bytes"] for each in result),
    )


def in_ranks(
    command: list[str], folder: Path, settings: dict[str, Any], ranks: int, variables: dict[str, str]
) -> list[dict[str, Any]]:
    """Run a command that reads settings.json in `folder` in `ranks` processes; return what each writes there."""
    write_json(folder / "settings.json", settings)
    where = topology({}, 1, ranks)
    assert where.listener
    where.listener.close()  # their first rank opens its own
    own = variables | {"MASTER_PORT": str(free_port())}
    finished([command] * ranks, [where.environment(rank) | own for rank in where.ranks], folder)
    return [read_json(folder / f"rank{rank}.json", Path(command[1]).name) for rank in where.ranks]


def free_port() -> int:
    """Return a port that no program uses, and that the system gives to none before the first rank opens it: below
    Linux's ip_local_port_range."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as listener:
            port = random.randrange(20_000, 32_000)  # noqa: S311 (not a secret)
            listener.bind(("", port))
            return port


def threads_of(ranks: int) -> str:
    """Return the threads of each rank, so that all together use all cores."""
    return str(max(1, (os.cpu_count() or 1) // ranks))


def finished(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> None:
    """Run processes side by side to their end. Raises SystemExit with the last lines of one that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"process{number}.log" for number in range(len(commands))]
    for command, environment, log in zip(commands, environments, logs, strict=True):
        with log.open("wb") as file:
            processes.append(subprocess.Popen(command, env=os.environ | QUIET | environment, stdout=file, stderr=file))
    codes = wait(processes, LONGEST_SECONDS)
    for code, log in zip(codes, logs, strict=True):
        if code:
            raise SystemExit("\n".join([f"exit code {code}:", *log.read_text(errors="replace").splitlines()[-15:]]))
    assert None not in codes, f"a process hangs; see {folder}"


# Rounds and results


def take_turns(contestants: dict[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Return the runs of every contestant, one a round, in alternating order."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for name in turns(contestants, rounds):
        runs[name].append(contestants[name]())
        print(f"{name}: {runs[name][-1].tokens_per_second(1):.1f} tokens/s", flush=True)
    return runs


def ratio(ours: list[Run], others: list[Run], measure: Callable[[Run], float]) -> dict[str, Any]:
    """Return the ratio of a measure, ours over the others', by round, and its median."""
    return by_round([measure(one) / measure(other) for one, other in zip(ours, others, strict=True)])


def summary(runs: list[Run], warm_up: int) -> dict[str, Any]:
    """Return a contestant's medians and its rounds."""
    return {
        "tokens_per_second": statistics.median(run.tokens_per_second(warm_up) for run in runs),
        "peak_host_bytes": statistics.median(run.peak_host_bytes for run in runs),
        "peak_gpu_bytes": statistics.median(run.peak_gpu_bytes for run in runs),
        "tokens": sum(step.tokens for step in runs[0].steps[warm_up:]),
        "supervised_tokens": sum(step.supervised for step in runs[0].steps[warm_up:]),
        "loss_mean": loss_mean(runs[0].steps),
        "rounds": [asdict(run) for run in runs],
    }


def loss_mean(steps: list[Step]) -> float:
    """Return the mean loss of the supervised tokens of some steps."""
    return sum(step.loss * step.supervised for step in steps) / sum(step.supervised for step in steps)


def about(device: str, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the machine of a result, and its load before."""
    return {
        "machine": machine((*PACKAGES, *packages)),
        "device": device,
        "load_average_before": round(os.getloadavg()[0], 1),
    }


# Options


def parser(text: str | None, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all contests share."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    result = parser_of(text)
    result.add_argument("--device", choices=("cpu", "cuda"), default=here)
    result.add_argument("--model", type=Path, default=MODEL, help="a directory with weights, or a config.json")
    result.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="for a model that is only a config.json")
    result.add_argument("--precision", choices=tuple(DTYPES), default=default_precision(), help="of all contestants")
    result.add_argument("--steps", type=int, default=6, help="optimizer steps of each training")
    result.add_argument("--warm-up", type=int, default=2, help="the first of these steps, which do not count")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--max-length", type=int, default=64, help="tokens of a row of the reference task")
    result.add_argument("--output", type=Path, default=RESULTS / output)
    return result


def model_of(options: argparse.Namespace, folder: Path) -> Path:
    """Return the directory of the model: the one named, or a new one with random weights for a config.json."""
    if options.model.is_dir():
        return Path(options.model).resolve()
    config = random_model(options.model, DTYPES[options.precision], folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer) if options.tokenizer.is_dir() else None
    if tokenizer is None or len(tokenizer) > config.vocab_size:
        tokenizer = trained_tokenizer(config.vocab_size)
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def trained_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a ChatML template, trained on the reference task and the documents of
    chat_rows.py, for a machine without the base model."""
    texts = [text for row in records("tens", 42) for text in row.values()] + [" ".join(document_words())]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4096, vocabulary), special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    trained.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=trained, bos_token=special[1], eos_token=special[2], pad_token=special[0]
    )
    wrapped.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return wrapped


def default_precision() -> str:
    """Return the precision that `precision: auto` selects on this machine."""
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def ranks_of(device: str) -> list[int]:
    """Return the numbers of processes to try: on a CPU one, and one a core; else one a GPU."""
    return sorted({1, os.cpu_count() or 1}) if device == "cpu" else [torch.cuda.device_count()]
