"""Pairs a CPU second and memory of DPO by `zerolora stage train`, TRL, LLaMA-Factory and ms-swift, in turn.

    .venv/bin/python benchmarks/train/preference_peers.py --llamafactory PYTHON --swift PYTHON

PYTHON is the interpreter of a virtual environment with the peer, as for against_peers.py; without it the peer is left
out. Needs the base model: run `make run` first. The task: "What is a + b?", where the chosen answer is the bare number
and the rejected one is the model's own. All train the same adapter on the same global batches of eight pairs of similar
length, on two ranks of a thread each, in fp32 without activation checkpointing, by DPO's sigmoid loss without an SFT
term. Each peer computes fp32 products once as installed, and once by the kernels that zerolora chooses.

CPU seconds are those of the second of two epochs, so loading, preparation and the first use of kernels do not count:
for zerolora the difference of trainings of two epochs and of one with all their processes, for the peers as each rank
counts its own. zerolora computes the log-probabilities of the reference in a stage of its own, and peers in every step:
the CPU seconds of one pass over the rows (the difference of the stage on all pairs and on one global batch) count in
zerolora's step, as if it served a single epoch of a single run. TRL can compute them before training
(precompute_ref_log_probs), which does not count here: that is compared with zerolora's step alone.

The script stops unless all train the same tokens, begin with a loss of log 2 and with the log-probabilities of
zerolora's reference, and have about the same losses at the end. Writes benchmarks/results/preference_peers.json.
"""

import argparse
import csv
import functools
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import contest
import numpy as np
import torch
from against_peers import (
    KERNELS,
    LENGTH,
    RANKS,
    ROWS,
    of_llamafactory,
    of_swift,
    of_trainer,
    ranks_of_peer,
    versions,
)
from chat_rows import CHATML
from contest import LORA, MODEL, TRAIN, Ours, about, finished
from measuring import RESULTS, by_round, children_cpu_seconds, parser_of, turns
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerolora.data.prepared_rows import open_split
from zerolora.evaluate.generation import answer_batch
from zerolora.files import canonical, read_json, write_json

PAIRS = 40
ROUNDS = 2
BETA = 0.1
LONGEST_ANSWER = 48  # tokens of the model's own answers
PROMPT = CHATML + "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
STORED = "reference before training"
TOLERANCE = 1e-4
"""Of the first step's loss and log-probabilities, relative."""
CLOSE = 0.02
"""Of the mean loss of the second epoch, relative."""


class Trained(NamedTuple):
    """What a training cost, and what it computed."""

    cpu_seconds: float
    """Of a step of eight pairs, both ranks together."""
    peak_host_bytes: int
    """Of both ranks together."""
    tokens: int
    """Of an epoch, of both sequences of each pair."""
    supervised: int
    losses: list[float]
    """Of each step."""
    first: dict[str, float]
    """Mean log-probabilities of chosen and rejected answers in the first step."""
    reference_cpu_seconds: float = 0.0
    """Ours: of the reference's log-probabilities of a step's pairs, outside of the step."""


def main() -> None:
    """Take turns, compare, write."""
    made = parser_of(__doc__)
    made.add_argument("--model", type=Path, default=MODEL)
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--llamafactory", help="the Python of its virtual environment")
    made.add_argument("--swift", help="the Python of ms-swift's virtual environment")
    made.add_argument("--output", type=Path, default=RESULTS / "preference_peers.json")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = about("cpu", ("trl",)) | {"model": options.model.stem, "pairs": PAIRS, "beta": BETA}
        for peer, python in {"llamafactory": options.llamafactory, "ms-swift": options.swift}.items():
            if python:
                result["machine"][peer] = versions(python, peer)
        task = Task(Path(name), options.model.resolve())
        for measured in rounds(contestants(task, options), options.rounds):
            write_json(options.output, result | {"steps_of_an_epoch": task.steps, **task.counts, **measured})


def contestants(task: "Task", options: argparse.Namespace) -> dict[str, Callable[[], Trained]]:
    """Return all trainers, ours first."""
    peers: dict[str, tuple[Callable[..., Trained], str]] = {"TRL": (trl, sys.executable)}
    if options.llamafactory:
        peers["LLaMA-Factory"] = (llamafactory, options.llamafactory)
    if options.swift:
        peers["ms-swift"] = (swift, options.swift)
    made: dict[str, Callable[[], Trained]] = {"zerolora": functools.partial(ours, task)}
    for name, (train, python) in peers.items():
        made[name] = functools.partial(train, task, python, False)
        made[f"{name}, {KERNELS}"] = functools.partial(train, task, python, True)
    made[f"TRL, {KERNELS}, {STORED}"] = functools.partial(trl, task, sys.executable, True, stored=True)
    return made


def rounds(trainings: dict[str, Callable[[], Trained]], count: int) -> Iterator[dict[str, Any]]:
    """Yield after each round the medians of each contestant, and the ratios by round to ours."""
    runs: dict[str, list[Trained]] = {name: [] for name in trainings}
    own, *others = runs
    for number, name in enumerate(turns(trainings, count), 1):
        runs[name].append(trainings[name]())
        print(f"{name}: {runs[name][-1]}", flush=True)
        if number % len(trainings):
            continue
        for other in others:
            check(other, runs[other][-1], runs[own][-1])
        yield {
            "contestants": {name: _summary(each) for name, each in runs.items()},
            "speed": {
                name: by_round([
                    each.cpu_seconds / (ours.cpu_seconds + (0 if STORED in name else ours.reference_cpu_seconds))
                    for each, ours in zip(runs[name], runs[own], strict=True)
                ])
                for name in others
            },
            "memory": {
                name: by_round([
                    ours.peak_host_bytes / each.peak_host_bytes
                    for each, ours in zip(runs[name], runs[own], strict=True)
                ])
                for name in others
            },
        }  # fmt: skip


def _summary(runs: list[Trained]) -> dict[str, Any]:
    """Return the medians of a contestant's rounds, and what it computed in the last."""
    seconds = [each.cpu_seconds + each.reference_cpu_seconds for each in runs]
    return {
        "cpu_seconds_a_step": by_round([each.cpu_seconds for each in runs]),
        "reference_cpu_seconds_a_step": by_round([each.reference_cpu_seconds for each in runs]),
        "pairs_a_cpu_second": ROWS * RANKS / statistics.median(seconds),
        "peak_host_bytes": by_round([each.peak_host_bytes for each in runs]),
        "losses": runs[-1].losses,
        "log_probabilities_of_first_step": runs[-1].first,
    }


def check(name: str, theirs: Trained, ours: Trained) -> None:
    """Raise SystemExit if a trainer has trained something else than ours."""
    middle = len(ours.losses) // 2
    last, wanted = (statistics.fmean(each.losses[middle:]) for each in (theirs, ours))
    for what, one, other, tolerance in (
        ("tokens", theirs.tokens, ours.tokens, 0.0),
        ("supervised tokens", theirs.supervised, ours.supervised, 0.0),
        ("steps", len(theirs.losses), len(ours.losses), 0.0),
        ("loss of the first step", theirs.losses[0], math.log(2), TOLERANCE),
        ("loss of our first step", ours.losses[0], math.log(2), TOLERANCE),
        ("log-probability of chosen answers", theirs.first["chosen"], ours.first["chosen"], TOLERANCE),
        ("log-probability of rejected answers", theirs.first["rejected"], ours.first["rejected"], TOLERANCE),
        ("mean loss of the second epoch", last, wanted, CLOSE),
    ):
        if not math.isclose(one, other, rel_tol=tolerance):
            raise SystemExit(f"{name}: {what} {one} instead of {other}")


def rows_of(model: Path) -> list[dict[str, Any]]:
    """Return pairs: the messages before the answer, the chosen and the rejected answer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False))
    # The system prompt that the model's own template writes.
    written = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", text, re.DOTALL)
    system = [{"role": "system", "content": written[1]}] if written else []
    draw = np.random.default_rng(0)
    sums = [(int(one), int(other)) for one, other in draw.integers(1, 100, (PAIRS, 2))]
    prompts = [[*system, {"role": "user", "content": f"What is {one} + {other}?"}] for one, other in sums]
    tokens = [
        tokenizer.apply_chat_template(each, chat_template=PROMPT, add_generation_prompt=True, return_dict=False)
        for each in prompts
    ]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answers = answer_batch(network, tokenizer.pad_token_id, tokens, {stop}, LONGEST_ANSWER)
    return [
        {"prompt": prompt, "chosen": str(one + other), "rejected": tokenizer.decode(answer, skip_special_tokens=True)}
        for prompt, (one, other), answer in zip(prompts, sums, answers, strict=True)
    ]


def batched(rows: list[dict[str, Any]], model: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the pairs in global batches of similar length, in an order of their own, and their number of tokens and of
    supervised tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def length(row: dict[str, Any], answer: str) -> int:
        messages = [*row["prompt"], {"role": "assistant", "content": row[answer]}]
        return len(tokenizer.apply_chat_template(messages, chat_template=PROMPT, return_dict=False))

    def before(row: dict[str, Any]) -> int:
        return len(
            tokenizer.apply_chat_template(
                row["prompt"], chat_template=PROMPT, add_generation_prompt=True, return_dict=False
            )
        )

    lengths = [(length(row, "chosen"), length(row, "rejected"), before(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -max(lengths[row]))
    batches = np.random.default_rng(0).permutation(np.array(order).reshape(-1, ROWS * RANKS))
    tokens = sum(chosen + rejected for chosen, rejected, _ in lengths)
    counts = {"tokens": tokens, "supervised": tokens - 2 * sum(prompt for _, _, prompt in lengths)}
    return [rows[row] for row in batches.ravel()], counts


class Pairs(contest.Task):  # type: ignore[misc]
    """The pairs as zerolora prepares them."""

    objective: Mapping[str, Any] = {"objective": "dpo", "dpo": {"beta": BETA, "sft_weight": 0.0}}
    """Keys of the config's section `train`."""

    def resolved(self, train: dict[str, Any], pack: dict[str, Any], render: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of every stage for the objective."""
        return super().resolved({**self.objective, **train}, pack, render)

    def reference(self) -> float:
        """Make the log-probabilities of the reference; return the CPU seconds of the command."""
        settings = self.resolved({"precision": "fp32"}, {}, {})["runs"]["default"]["reference"]
        shutil.rmtree(self.folder / "reference", ignore_errors=True)
        paths = {"data": self.data, "weights": self.folder / "weights/model.json", "output": self.folder / "reference"}
        options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
        before = children_cpu_seconds()
        command = [sys.executable, "-m", "zerolora", "stage", "reference", "--settings", canonical(settings), *options]
        finished([command], [{"OMP_NUM_THREADS": "1"}], self.folder)
        return children_cpu_seconds() - before


class OursOfPairs(Ours):  # type: ignore[misc]
    """Training that compares with the reference of its task."""

    def command(self) -> list[str]:
        """Return the command of `zerolora stage train`."""
        return [*super().command(), "--reference", str(self.task.folder / "reference")]


class Task:
    """The model and the pairs, in the form of each trainer."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        rows, self.counts = batched(rows_of(model), model)
        self.steps = len(rows) // (ROWS * RANKS)
        """Of an epoch."""

        def answer(text: str) -> dict[str, str]:
            return {"role": "assistant", "content": text}

        def explicit(row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "chosen": [answer(row["chosen"])], "rejected": [answer(row["rejected"])]}

        self.explicit = self._write("explicit", [explicit(row) for row in rows])
        """In the form of TRL, which is ours too."""
        self.ranking = self._write(
            "ranking",
            [
                {"messages": row["prompt"], "chosen": answer(row["chosen"]), "rejected": answer(row["rejected"])}
                for row in rows
            ],
        )
        self.swift = self._write(
            "swift",
            [
                {"messages": [*row["prompt"], answer(row["chosen"])], "rejected_response": row["rejected"]}
                for row in rows
            ],
        )
        self.pairs = self._prepared("pairs", self.explicit)
        lines = self.explicit.read_text(encoding="utf-8").splitlines(keepends=True)
        self.few = self._prepared("few", self._write("one-batch", [json.loads(line) for line in lines[: ROWS * RANKS]]))
        """The pairs of the first global batch alone."""

    def _write(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return path

    def _prepared(self, name: str, rows: Path) -> Pairs:
        folder = self.folder / name
        folder.mkdir()
        held_out = {"validation": 0, "test": 0}
        section = {"path": str(rows), "format": "preference", "max_length": LENGTH, "split": held_out}
        return Pairs(folder, self.model, "cpu", section)


def ours(task: Task) -> Trained:
    """Make the reference and train with zerolora."""
    whole, few = task.pairs.reference(), task.few.reference()
    train = {
        **TRAIN, "global_batch": ROWS * RANKS, "micro_batch": ROWS, "ranks_per_node": RANKS, "precision": "fp32",
    }  # fmt: skip
    used: list[float] = []
    for epochs in (1, 2):
        folder = task.pairs.folder / f"ours-{epochs}"
        training = OursOfPairs(task.pairs, folder, {**train, "epochs": epochs}, {}, "auto", "1")
        before = children_cpu_seconds()
        finished([training.command()], [{"OMP_NUM_THREADS": "1"}], folder)
        used.append(children_cpu_seconds() - before)
    metrics = folder / "run/metrics"
    with (metrics / "telemetry.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    rows = open_split(task.pairs.data, "train")
    stored = open_split(task.few.folder / "reference", "train")
    return Trained(
        (used[1] - used[0]) / task.steps,
        read_json(metrics / "train_resources.json", "train")["peak_host_bytes_all_ranks"],
        sum(rows["length"]),
        sum(rows["supervised"]),
        losses,
        {name: statistics.fmean(stored[f"reference_{name}"]) for name in ("chosen", "rejected")},
        (whole - few) / (task.steps - 1),
    )


def trl(task: Task, python: str, onednn: bool, stored: bool = False) -> Trained:
    """Train with TRL's DPOTrainer; with `stored`, the reference's log-probabilities are computed before training."""
    lora = {"r": LORA["r"], "lora_alpha": LORA["alpha"], "lora_dropout": LORA["dropout"]}
    folder = _folder(task, "trl")
    settings = {
        "model": str(task.model), "rows": str(task.explicit), "template": PROMPT,
        "lora": {**lora, "target_modules": LORA["targets"]}, "loss_type": ["sigmoid"], "beta": BETA,
        "max_length": LENGTH, "gradient_checkpointing": False, "train_sampling_strategy": "sequential",
        "disable_tqdm": True, "precompute_ref_log_probs": stored, **of_trainer(folder, task.steps, TRAIN, 1),
    }  # fmt: skip
    return _peer("trl-dpo", python, folder, settings, task, onednn)


def llamafactory(task: Task, python: str, onednn: bool) -> Trained:
    folder = _folder(task, "llamafactory")
    columns = {name: name for name in ("messages", "chosen", "rejected")}
    settings = {
        "stage": "dpo", "pref_loss": "sigmoid", "pref_beta": BETA, "pref_ftx": 0.0,
        **of_llamafactory(folder, task.model, task.ranking, columns, ranking=True),
        **of_trainer(folder, task.steps, TRAIN, 1),
    }  # fmt: skip
    return _peer("llamafactory", python, folder, settings, task, onednn)


def swift(task: Task, python: str, onednn: bool) -> Trained:
    folder = _folder(task, "swift")
    settings = {
        "rlhf_type": "dpo", "loss_type": "sigmoid", "beta": BETA, **of_swift(task.model, task.swift),
        **of_trainer(folder, task.steps, TRAIN, 1),
    }  # fmt: skip
    return _peer("swift-rlhf", python, folder, settings, task, onednn)


def _folder(task: Task, name: str) -> Path:
    folder = task.folder / name
    folder.mkdir(exist_ok=True)
    return folder


def _peer(kind: str, python: str, folder: Path, settings: dict[str, Any], task: Task, onednn: bool) -> Trained:
    ranks = ranks_of_peer(kind, python, folder, settings, onednn)
    logs = [each for each in ranks[0]["logs"] if "loss" in each]
    used = [each["cpu_seconds"][-1] - each["cpu_seconds"][-1 - task.steps] for each in ranks]
    return Trained(
        sum(used) / task.steps,
        sum(each["peak_host_bytes"][0] for each in ranks),
        sum(sum(each["tokens"]) for each in ranks) // 2,
        sum(sum(each["supervised"]) for each in ranks) // 2,
        [float(each["loss"]) for each in logs],
        {name: float(logs[0][f"logps/{name}"]) for name in ("chosen", "rejected")},
    )


if __name__ == "__main__":
    main()
