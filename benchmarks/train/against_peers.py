"""CPU seconds of an optimizer step by `zerolora train`, TRL, LLaMA-Factory and ms-swift, in turn.

    .venv/bin/python benchmarks/train/against_peers.py --llamafactory PYTHON --swift PYTHON

PYTHON is the interpreter of a virtual environment with the peer (llamafactory 0.9.5, ms-swift 4.6.0; they need other
versions of transformers and peft); without it the peer is left out. Needs the base model: run `make run` first. All
train the same adapter on the same rows, eight a step on two ranks of a thread each, in fp32 without activation
checkpointing: the reference task, and a chat set with a system prompt of --system words. All compute fp32 products by
the kernels that zerolora chooses. A step costs what both ranks use from the end of step --fewest to that of step
--steps, so loading and preparation do not count: for zerolora the difference of two trainings with all their processes,
for the peers as each process counts it. Writes benchmarks/results/train_peers.json.
"""

import argparse
import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_rows import write_chat
from common_prefix import LONGEST
from contest import LORA, TRAIN, Task, about, finished, model_of, opponent, parser
from measuring import children_cpu_seconds, turns
from transformers import AutoTokenizer

from zerolora.data.reference import records
from zerolora.files import read_json, write_json
from zerolora.train.launch.topology import topology

RANKS, ROWS = 2, 4  # rows of a rank, one micro-batch
ROUNDS = 2
COUNTS = {"train": 400, "validation": 8, "test": 8}
LENGTH = 512  # tokens, which no row has
TURN = "'<|im_start|>' + message['role'] + '\\n'"
# ChatML with the mark that TRL needs.
TEMPLATE = (
    "{% for message in messages %}{{ " + TURN + " }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
Train = Callable[[], float]
"""Trains, and returns CPU seconds a step."""


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_peers.json")
    made.set_defaults(steps=12, rounds=ROUNDS)
    made.add_argument("--fewest", type=int, default=2, help="steps of the shorter training")
    made.add_argument("--system", type=int, default=100, help="words of the chat set's system prompt")
    made.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    made.add_argument("--llamafactory", help="the Python of its virtual environment")
    made.add_argument("--swift", help="the Python of ms-swift's virtual environment")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = about("cpu") | {"model": options.model.stem, "steps": [options.fewest, options.steps], "tasks": {}}
        for task in options.tasks:
            folder = Path(name, task)
            folder.mkdir()
            result["tasks"][task] = figures(contestants(TASKS[task](folder, options), options), options)
            write_json(options.output, result)


def figures(trainings: dict[str, Train], options: argparse.Namespace) -> dict[str, Any]:
    """Return each contestant's CPU seconds a step, and theirs over ours by round."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for name in turns(trainings, options.rounds):
        seconds[name].append(trainings[name]())
        print(f"{name}: {seconds[name][-1]:.2f} CPU seconds a step", flush=True)
    ours, *others = seconds
    return {
        "cpu_seconds_a_step": {
            name: {"median": statistics.median(each), "rounds": each} for name, each in seconds.items()
        },
        "over_ours": {
            name: statistics.median(other / own for other, own in zip(seconds[name], seconds[ours], strict=True))
            for name in others
        },
    }  # fmt: skip


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


def _task(folder: Path, options: argparse.Namespace) -> Task:
    prepared = {
        "path": str(folder / "rows"), "max_length": LENGTH, "split": {"validation": 0, "test": 0},
        "sources": {f"{split}.jsonl": {"split": split} for split in COUNTS},
    }  # fmt: skip
    return Task(folder, model_of(options, folder), "cpu", prepared)


TASKS = {"reference task": sums_task, "system prompt": chat_task}


def contestants(task: Task, options: argparse.Namespace) -> dict[str, Train]:
    """Return all trainers, ours first."""
    made: dict[str, Train] = {
        "zerolora": functools.partial(_ours, task, options),
        "TRL": functools.partial(_trl, task, options),
    }
    if options.llamafactory:
        made["LLaMA-Factory"] = functools.partial(_llamafactory, task, options)
    if options.swift:
        made["ms-swift"] = functools.partial(_swift, task, options)
    return made


def _ours(task: Task, options: argparse.Namespace) -> float:
    train = {**TRAIN, "global_batch": ROWS * RANKS, "micro_batch": ROWS, "ranks_per_node": RANKS, "precision": "fp32"}
    used = []
    for steps in (options.fewest, options.steps):
        ours = task.ours(f"ours-{steps}", {**train, "max_steps": steps}, {}, threads="1")
        before = children_cpu_seconds()
        ours.train()
        used.append(children_cpu_seconds() - before)
    return (used[1] - used[0]) / (options.steps - options.fewest)


def _trl(task: Task, options: argparse.Namespace) -> float:
    settings = {
        **TRAIN, "model": str(task.model), "rows": str(task.folder / "rows/train.jsonl"), "device": "cpu",
        "template": TEMPLATE, "precision": "fp32", "attention": "sdpa", "lora": LORA, "micro_batch": ROWS,
        "accumulation": 1, "max_steps": options.steps, "gradient_checkpointing": False, "onednn": True,
        "sft": {"max_length": LENGTH, "train_sampling_strategy": "group_by_length"},
    }  # fmt: skip
    opponent("trl", task.folder / "trl", settings, RANKS)
    return _seconds(task.folder / "trl", options)


def _llamafactory(task: Task, options: argparse.Namespace) -> float:
    folder = task.folder / "llamafactory"
    folder.mkdir(exist_ok=True)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    rows = {
        "file_name": str(task.folder / "rows/train.jsonl"), "formatting": "sharegpt",
        "columns": {"messages": "messages"}, "tags": {**tags, "system_tag": "system"},
    }  # fmt: skip
    write_json(folder / "dataset_info.json", {"rows": rows})
    settings = {
        "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": LORA["r"],
        "lora_alpha": int(LORA["alpha"]), "lora_dropout": LORA["dropout"], "lora_target": "all",
        "model_name_or_path": str(task.model), "dataset": "rows", "dataset_dir": str(folder), "template": "chatml",
        "cutoff_len": LENGTH, "flash_attn": "sdpa", "disable_gradient_checkpointing": True,
        "preprocessing_num_workers": 1, **_arguments(folder, options.steps),
    }  # fmt: skip
    return _peer("llamafactory", options.llamafactory, folder, settings, options)


def _swift(task: Task, options: argparse.Namespace) -> float:
    folder = task.folder / "swift"
    folder.mkdir(exist_ok=True)
    settings = {
        "model": str(task.model), "model_type": "llama", "template": "chatml", "tuner_type": "lora",
        "dataset": str(task.folder / "rows/train.jsonl"), "split_dataset_ratio": 0, "torch_dtype": "float32",
        "lora_rank": LORA["r"], "lora_alpha": int(LORA["alpha"]), "lora_dropout": LORA["dropout"],
        "target_modules": LORA["targets"], "max_length": LENGTH, "attn_impl": "sdpa",
        "gradient_checkpointing": False, "eval_strategy": "no", "dataset_num_proc": 1,
        **_arguments(folder, options.steps),
    }  # fmt: skip
    return _peer("swift", options.swift, folder, settings, options)


def _arguments(folder: Path, steps: int) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer, which both peers take."""
    return {
        "output_dir": str(folder / "output"), "max_steps": steps, "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1, "learning_rate": TRAIN["learning_rate"],
        "lr_scheduler_type": TRAIN["schedule"], "weight_decay": TRAIN["weight_decay"],
        "max_grad_norm": TRAIN["gradient_clipping"], "optim": "adamw_torch", "bf16": False, "fp16": False,
        "use_cpu": True, "ddp_backend": "gloo", "save_strategy": "no", "logging_steps": 1000, "report_to": "none",
        "dataloader_num_workers": 0, "seed": TRAIN["seed"], "train_sampling_strategy": "group_by_length",
    }  # fmt: skip


def _peer(kind: str, python: str, folder: Path, settings: dict[str, Any], options: argparse.Namespace) -> float:
    """Train with a peer on RANKS ranks."""
    write_json(folder / "settings.json", settings)
    where = topology({}, 1, RANKS)
    assert where.listener
    where.listener.close()  # their first rank opens its own
    command = [python, str(Path(__file__).with_name("peers.py")), kind, str(folder)]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished([command] * RANKS, [own | where.environment(rank) for rank in where.ranks], folder)
    return _seconds(folder, options)


def _seconds(folder: Path, options: argparse.Namespace) -> float:
    """Return CPU seconds a step from the files of a peer's ranks."""
    used = 0.0
    for rank in range(RANKS):
        seconds = read_json(folder / f"rank{rank}.json", "peers.py")["cpu_seconds"]
        used += seconds[-1] - seconds[options.fewest - options.steps - 1]
    return used / (options.steps - options.fewest)


if __name__ == "__main__":
    main()
