"""CPU seconds of an optimizer step by `zerolora stage train`, TRL, LLaMA-Factory and ms-swift, in turn.

    .venv/bin/python benchmarks/train/against_peers.py --llamafactory PYTHON --swift PYTHON

PYTHON is the interpreter of a virtual environment with the peer (llamafactory 0.9.5, ms-swift 4.6.0; they need other
versions of transformers and peft); without it the peer is left out. Needs the base model: run `make run` first. All
train the same adapter on the same global batches of eight rows, on two ranks of a thread each, in fp32 without
activation checkpointing: the reference task, and a chat set with a system prompt of --system words. Global batches are
of rows of similar length, as each trainer makes them of a large set. zerolora trains the chat set packed, too; its step
then counts as a peer's on as many rows. Each peer computes fp32 products once as installed, and once by the kernels
that zerolora chooses.

CPU seconds are those of the second of two epochs of --steps steps, half as many for the chat set, on the same rows for
all. So loading, preparation and the first use of kernels do not count: for zerolora the difference of trainings of two
epochs and of one with all their processes, for the peers as each rank counts its own. The learning rate is almost 0, so
that all have the base model's losses: a peer that trained other tokens than zerolora, or has another mean loss, ends
the script. Writes benchmarks/results/train_peers.json.
"""

import argparse
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chat_rows import CHATML, write_chat
from common_prefix import CAPACITY, LONGEST
from contest import LORA, TRAIN, Step, Task, about, in_ranks, loss_mean, model_of, opponent, parser, split_task
from measuring import by_round, children_cpu_seconds, turns
from transformers import AutoTokenizer

from zerolora.data.reference import records
from zerolora.files import read_json, write_json

RANKS, ROWS = 2, 4  # rows of a rank, one micro-batch
ROUNDS = 3
POOL = 400  # rows of which the global batches are made
COUNTS = {"train": POOL, "validation": 8, "test": 8}
LENGTH = 1024  # tokens, which no row has
STILL = {**TRAIN, "learning_rate": 1e-12}
TOLERANCE = 1e-5
"""Of the mean loss, relative."""
KERNELS = "zerolora's matmul kernels"


class Trained(NamedTuple):
    """What a training cost, and what it computed."""

    cpu_seconds: float
    """Of a step of eight rows, both ranks together."""
    steps: list[Step]
    """The steps of both epochs."""


Train = Callable[[], Trained]


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_peers.json")
    made.set_defaults(steps=16, rounds=ROUNDS)
    made.add_argument("--system", type=int, default=100, help="words of the chat set's system prompt")
    made.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    made.add_argument("--llamafactory", help="the Python of its virtual environment")
    made.add_argument("--swift", help="the Python of ms-swift's virtual environment")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = about("cpu", ("trl",)) | {"model": options.model.stem, "tasks": {}}
        for peer, python in {"llamafactory": options.llamafactory, "ms-swift": options.swift}.items():
            if python:
                result["machine"][peer] = versions(python, peer)
        steps = options.steps
        for task in options.tasks:
            folder = Path(name, task)
            folder.mkdir()
            write, chats = TASKS[task], TASKS[task] is chat_task
            options.steps = steps // 2 if chats else steps
            for measured in rounds(contestants(write(folder, options), options, packed=chats), options):
                result["tasks"][task] = measured
                write_json(options.output, result)


def versions(python: str, peer: str) -> dict[str, str]:
    """Return the versions of a peer and of what it computes with."""
    names = (peer, "torch", "transformers", "peft", "accelerate")
    script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    versions: dict[str, str] = json.loads(subprocess.check_output([python, "-c", script]))
    return versions


def rounds(trainings: dict[str, Train], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield after each round each contestant's CPU seconds a step, their mean losses, and theirs over ours by round."""
    runs: dict[str, list[Trained]] = {name: [] for name in trainings}
    ours, *others = runs
    for number, name in enumerate(turns(trainings, options.rounds), 1):
        runs[name].append(trainings[name]())
        check(name, runs[name][-1].steps, runs[ours][0].steps)
        print(f"{name}: {runs[name][-1].cpu_seconds:.2f} CPU seconds a step", flush=True)
        if number % len(trainings):
            continue
        seconds = {name: [each.cpu_seconds for each in trained] for name, trained in runs.items()}
        yield {
            "steps": options.steps,
            "cpu_seconds_a_step": {
                name: by_round(each) for name, each in seconds.items()
            },
            "over_ours": {
                name: statistics.median(other / own for other, own in zip(seconds[name], seconds[ours], strict=True))
                for name in others
            },
            "mean_loss": {name: loss_mean(trained[0].steps) for name, trained in runs.items()},
        }  # fmt: skip


def check(name: str, steps: list[Step], ours: list[Step]) -> None:
    """Raise SystemExit if a trainer's steps are of other tokens than ours, or have another mean loss."""
    counts, expected = (
        (sum(step.tokens for step in each), sum(step.supervised for step in each)) for each in (steps, ours)
    )
    loss, wanted = loss_mean(steps), loss_mean(ours)
    if counts != expected or abs(loss / wanted - 1) > TOLERANCE:
        raise SystemExit(
            f"{name}: {counts} tokens and supervised tokens at a mean loss of {loss}, but zerolora has {expected} at "
            f"{wanted}"
        )


def chat_task(folder: Path, options: argparse.Namespace) -> Task:
    """Return conversations that all begin with the same system prompt."""
    write_rows(folder, lambda path, count, seed: write_chat(path, count, seed, LONGEST, options.system))
    return _task(folder, options)


def sums_task(folder: Path, options: argparse.Namespace) -> Task:
    """Return the reference task, with the system prompt of the model's template written out for the peers."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False))
    system = text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
    rows = iter(records("tens", 42))

    def write(path: Path, count: int, _: int) -> None:
        lines = []
        for each in itertools.islice(rows, count):
            texts = {"system": system, "user": each["instruction"], "assistant": each["output"]}
            lines.append(json.dumps({"messages": [{"role": role, "content": texts[role]} for role in texts]}))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    write_rows(folder, write)
    return _task(folder, options)


def write_rows(folder: Path, write: Callable[[Path, int, int], None]) -> None:
    """Write the rows of each split by `write`, which takes a file, the number of rows and a seed."""
    (folder / "rows").mkdir()
    for number, (split, count) in enumerate(COUNTS.items()):
        write(folder / f"rows/{split}.jsonl", count, number)


def batched(path: Path, model: Path, steps: int) -> None:
    """Leave in a file of rows `steps` global batches of rows of similar length, in an order of their own.

    All rows are sorted by length and cut into global batches, of which the middle one of each of `steps` parts stays:
    an epoch then has the lengths of the whole set, padded as little as in a large set grouped by length.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["messages"] for line in lines]
    encoded = tokenizer.apply_chat_template(texts, chat_template=CHATML, return_dict=False)
    order = sorted(range(len(lines)), key=lambda row: -len(encoded[row]))
    batches = np.array(order[: len(order) // (ROWS * RANKS) * ROWS * RANKS]).reshape(-1, ROWS * RANKS)
    middle = ((np.arange(steps) + 0.5) * len(batches) / steps).astype(int)
    chosen = np.random.default_rng(0).permutation(batches[middle]).ravel().tolist()
    path.write_text("".join(f"{lines[row]}\n" for row in chosen), encoding="utf-8")


def _task(folder: Path, options: argparse.Namespace) -> Task:
    model = model_of(options, folder)
    batched(folder / "rows/train.jsonl", model, options.steps)
    return split_task(folder, model, "cpu", COUNTS, LENGTH)


TASKS = {"reference task": sums_task, "system prompt": chat_task}


def contestants(task: Task, options: argparse.Namespace, packed: bool) -> dict[str, Train]:
    """Return all trainers, ours first; with `packed` also ours on packed rows."""
    made: dict[str, Train] = {"zerolora": functools.partial(_ours, task, options, {})}
    peers: dict[str, Callable[..., Trained]] = {"TRL": _trl}
    if options.llamafactory:
        peers["LLaMA-Factory"] = _llamafactory
    if options.swift:
        peers["ms-swift"] = _swift
    for name, train in peers.items():
        made[name] = functools.partial(train, task, options, False)
        made[f"{name}, {KERNELS}"] = functools.partial(train, task, options, True)
    if packed:
        made["zerolora, packed"] = functools.partial(_ours, task, options, {"packing": True, "capacity": CAPACITY})
    return made


def _ours(task: Task, options: argparse.Namespace, pack: dict[str, Any]) -> Trained:
    rows = 1 if pack else ROWS
    train = {**STILL, "global_batch": rows * RANKS, "micro_batch": rows, "ranks_per_node": RANKS, "precision": "fp32"}
    train["group_by_length"] = True  # into the global batches of `batched`
    used, runs = [], []
    for epochs in (1, 2):
        ours = task.ours(f"ours-{epochs}-{bool(pack)}", {**train, "epochs": epochs}, pack, threads="1")
        before = children_cpu_seconds()
        runs.append(ours.train())
        used.append(children_cpu_seconds() - before)
    # Packed rows that do not fill the last step of an epoch join the next.
    tokens = [sum(step.tokens for step in run.steps) for run in runs]
    share = task.stats["train_tokens"] / (tokens[1] - tokens[0])
    return Trained((used[1] - used[0]) * share / options.steps, runs[1].steps)


def _trl(task: Task, options: argparse.Namespace, onednn: bool) -> Trained:
    settings = {
        **STILL, "model": str(task.model), "rows": str(task.folder / "rows/train.jsonl"), "device": "cpu",
        "template": CHATML, "precision": "fp32", "attention": "sdpa", "lora": LORA, "micro_batch": ROWS,
        "accumulation": 1, "max_steps": 2 * options.steps, "gradient_checkpointing": False, "onednn": onednn,
        "sft": {"max_length": LENGTH, "train_sampling_strategy": "sequential"},
    }  # fmt: skip
    run = opponent("trl", task.folder / "trl", settings, RANKS)
    return _trained(task.folder / "trl", run.steps, options)


def _llamafactory(task: Task, options: argparse.Namespace, onednn: bool) -> Trained:
    folder = task.folder / "llamafactory"
    folder.mkdir(exist_ok=True)
    settings = {
        "stage": "sft", "train_sampling_strategy": "sequential",
        **of_llamafactory(folder, task.model, task.folder / "rows/train.jsonl", {"messages": "messages"}),
        **of_trainer(folder, options.steps, STILL, 1000),
    }  # fmt: skip
    return _peer("llamafactory", options.llamafactory, folder, settings, options, onednn)


def _swift(task: Task, options: argparse.Namespace, onednn: bool) -> Trained:
    folder = task.folder / "swift"
    folder.mkdir(exist_ok=True)
    settings = of_swift(task.model, task.folder / "rows/train.jsonl") | of_trainer(folder, options.steps, STILL, 1000)
    return _peer("swift", options.swift, folder, settings, options, onednn)


def of_llamafactory(folder: Path, model: Path, rows: Path, columns: dict[str, str], **keys: Any) -> dict[str, Any]:
    """Return LLaMA-Factory's settings for rows of these columns, with more `keys` of its dataset_info.json."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    data = {
        "file_name": str(rows), "formatting": "sharegpt", "columns": columns, "tags": {**tags, "system_tag": "system"},
    }  # fmt: skip
    write_json(folder / "dataset_info.json", {"rows": data | keys})
    return {
        "do_train": True, "finetuning_type": "lora", "lora_rank": LORA["r"], "lora_alpha": int(LORA["alpha"]),
        "lora_dropout": LORA["dropout"], "lora_target": "all", "model_name_or_path": str(model), "dataset": "rows",
        "dataset_dir": str(folder), "template": "rows", "cutoff_len": LENGTH, "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True, "disable_shuffling": True, "preprocessing_num_workers": 1,
    }  # fmt: skip


def of_swift(model: Path, rows: Path) -> dict[str, Any]:
    """Return the options of ms-swift's commands."""
    return {
        "model": str(model), "model_type": "llama", "template": "rows", "tuner_type": "lora", "dataset": str(rows),
        "split_dataset_ratio": 0, "torch_dtype": "float32", "lora_rank": LORA["r"], "lora_alpha": int(LORA["alpha"]),
        "lora_dropout": LORA["dropout"], "target_modules": LORA["targets"], "max_length": LENGTH, "attn_impl": "sdpa",
        "gradient_checkpointing": False, "eval_strategy": "no", "dataset_num_proc": 1, "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
    }  # fmt: skip


def of_trainer(folder: Path, steps: int, train: dict[str, Any], logging_steps: int) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer, which all peers take, for two epochs."""
    return {
        "output_dir": str(folder / "output"), "max_steps": 2 * steps, "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1, "learning_rate": train["learning_rate"],
        "lr_scheduler_type": train["schedule"], "weight_decay": train["weight_decay"],
        "max_grad_norm": train["gradient_clipping"], "optim": "adamw_torch", "bf16": False, "fp16": False,
        "use_cpu": True, "ddp_backend": "gloo", "save_strategy": "no", "logging_steps": logging_steps,
        "report_to": "none", "dataloader_num_workers": 0, "seed": train["seed"],
    }  # fmt: skip


def _peer(
    kind: str, python: str, folder: Path, settings: dict[str, Any], options: argparse.Namespace, onednn: bool
) -> Trained:
    """Train with a peer on RANKS ranks."""
    ranks = ranks_of_peer(kind, python, folder, settings, onednn)
    columns = {name: np.array([each[name] for each in ranks]).sum(0) for name in ("tokens", "supervised", "losses")}
    steps = [
        Step(seconds=0.0, tokens=int(tokens), supervised=int(supervised), loss=float(loss / RANKS))
        for tokens, supervised, loss in zip(*columns.values(), strict=True)
    ]
    return _trained(folder, steps, options)


def ranks_of_peer(
    kind: str, python: str, folder: Path, settings: dict[str, Any], onednn: bool, ranks: int = RANKS
) -> list[dict[str, list[Any]]]:
    """Train with a peer on some ranks, and return what peers.py writes for each."""
    shutil.rmtree(folder / "output", ignore_errors=True)  # LLaMA-Factory refuses that of an earlier round
    command = [python, str(Path(__file__).with_name("peers.py")), kind, str(folder), *(["--onednn"] if onednn else [])]
    return in_ranks(command, folder, settings, ranks, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def _trained(folder: Path, steps: list[Step], options: argparse.Namespace) -> Trained:
    """Return the CPU seconds of a step in the second epoch, from the files of a peer's ranks."""
    used = 0.0
    for rank in range(RANKS):
        seconds = read_json(folder / f"rank{rank}.json", "peers.py")["cpu_seconds"]
        used += seconds[-1] - seconds[-1 - options.steps]
    return Trained(used / options.steps, steps)


if __name__ == "__main__":
    main()
