"""Distilled tokens a CPU second by the stages `teacher` and `train`, and by TRL's and ms-swift's GKDTrainer, in turn.

    .venv/bin/python benchmarks/train/distillation_peers.py --swift PYTHON

PYTHON is the interpreter of a virtual environment with ms-swift==4.6.0, and msgspec, which its GKD imports; without an
interpreter ms-swift is left out.

Student and teacher are two models of SmolLM2-135M's shape with random weights, since only speed is compared. TRL has no
stored probabilities: its trainers call the teacher in every step, and compare whole vocabularies. So does ms-swift, but
it compares the teacher's --gkd_logits_topk likeliest tokens alone, here as many as are stored. Both GKDTrainers distil
on given answers with lmbda: 0, and beta: 0 is the forward divergence, which is zerolora's with alpha: 0. All train the
same LoRA adapter on the same rows, eight of similar length in a step, in one process of one thread, in fp32 without
activation checkpointing. The peers compute fp32 products once as installed, and once by the kernels that zerolora
chooses. TRL's trainer for answers of the student, DistillationTrainer, has no given answers, and is not compared.

CPU seconds are those of the second of two epochs, so loading and the first use of kernels do not count: for zerolora
the difference of trainings of two epochs and of one with all their processes, for the peers as each process counts its
own. The stage `teacher` is timed as the difference of all rows and of one global batch, and counts in whole, as if its
values served a single epoch of a single run. --more adds rounds to those of an earlier start. Writes
benchmarks/results/distillation_peers.json.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import contest
from against_peers import of_swift, of_trainer, ranks_of_peer, versions
from contest import LORA, TRAIN, Ours, about, finished
from measuring import RESULTS, ROOT, by_round, children_cpu_seconds, parser_of, random_model, turns

from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.files import canonical, read_json, write_json

ROWS, BATCH, LONGEST, ROUNDS = 48, 8, 96, 2
CONFIG = ROOT / "config/recipes/models/smollm2-135m.json"
TOP_K = 64
SYSTEM = 4
"""Words of the system prompt, with which the peers' template begins."""
OURS = "zerolora"
KERNELS = "zerolora's kernels"


def main() -> None:
    """Take turns, compare, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--swift", help="the Python of ms-swift's virtual environment")
    parser.add_argument("--more", action="store_true", help="add rounds to the known ones of the same work")
    parser.add_argument("--peer", type=Path, help="settings of a training by TRL in this process")
    parser.add_argument("--output", type=Path, default=RESULTS / "distillation_peers.json")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(trl_in_this_process(json.loads(options.peer.read_text(encoding="utf-8")))))
        return
    with tempfile.TemporaryDirectory() as name:
        task = Task(Path(name), options)
        peers = ["TRL", "ms-swift"] if options.swift else ["TRL"]
        runs: dict[str, list[dict[str, float]]] = {OURS: []}
        runs |= {name: [] for peer in peers for name in (peer, f"{peer}, {KERNELS}")}
        result = about("cpu", ("trl",)) | {"rows": ROWS, "top_k": TOP_K, "layers": options.layers, **task.counts}
        if options.swift:
            result["machine"]["ms-swift"] = versions(options.swift, "ms-swift")
        if options.more:
            known = read_json(options.output, "this script")
            # The rows are made of the project's documents, so another commit may have others.
            if [known[name] for name in ("layers", "tokens")] != [result[name] for name in ("layers", "tokens")]:
                raise SystemExit(f"{options.output} is of other work; leave --more out")
            runs = {name: known["contestants"][name]["runs"] for name in runs}
        for number, contestant in enumerate(turns(runs, options.rounds), 1):
            peer, _, kernels = contestant.partition(", ")
            train = trl if peer == "TRL" else swift
            runs[contestant].append(ours(task) if peer == OURS else train(task, bool(kernels)))
            print(contestant, runs[contestant][-1], flush=True)
            if number % len(runs) == 0:
                write_json(options.output, result | compared(task, runs))


def compared(task: "Task", runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the figures of all contestants, and how many times as many CPU seconds the others take."""
    own, *others = runs
    return {
        "contestants": {name: summary(task, each) for name, each in runs.items()},
        "speed": {
            name: by_round(
                [
                    theirs["cpu_seconds"] / ours["cpu_seconds"]
                    for theirs, ours in zip(runs[name], runs[own], strict=True)
                ]
            )
            for name in others
        },
    }


def summary(task: "Task", runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the rounds of a contestant's figures, and the tokens that it distils in a CPU second."""
    figures = {name: by_round([each[name] for each in runs]) for name in runs[0]}
    return figures | {
        "runs": runs,
        "tokens_a_cpu_second": by_round([task.counts["supervised"] / each["cpu_seconds"] for each in runs]),
    }


class Task:
    """Student, teacher and rows."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, models = folder, options, {}
        tokenizer: Any = None
        for seed, name in enumerate(("student", "teacher")):
            models[name] = folder / name
            config = random_model(CONFIG, contest.DTYPES["fp32"], models[name], options.layers, seed)
            tokenizer = tokenizer or contest.trained_tokenizer(config.vocab_size)
            tokenizer.save_pretrained(models[name])
        self.student, self.teacher = models["student"], models["teacher"]
        self.whole, self.few = (self._prepared(name, counts) for name, counts in (("whole", ROWS), ("few", BATCH)))
        for path in ("weights", "models"):
            (folder / path).mkdir()
        directory = contest.FetchDirectory(path=str(self.teacher), license="Apache-2.0")
        contest.fetch(directory, folder / "weights/teacher", folder / "models/teacher")
        contest.restore(folder / "models/teacher", folder / "weights/teacher")
        rows = open_split(self.whole.data, "train")
        self.counts = {"tokens": sum(rows["length"]), "supervised": sum(rows["supervised"])}

    def _prepared(self, name: str, rows: int) -> contest.Task:
        class Distilled(contest.Task):  # type: ignore[misc]
            def resolved(self, train: dict[str, Any], pack: dict[str, Any], render: dict[str, Any]) -> dict[str, Any]:
                own = {"objective": "distill", "distill": {"teacher": "model", "alpha": 0.0, "top_k": TOP_K}}
                return super().resolved({**own, "precision": "fp32", **train}, pack, render)

        folder = self.folder / name
        (folder / "rows").mkdir(parents=True)
        contest.write_chat(folder / "rows/train.jsonl", rows, longest=LONGEST, system=SYSTEM)
        section = {"path": str(folder / "rows/train.jsonl"), "max_length": 512, "split": {"validation": 0, "test": 0}}
        return Distilled(folder, self.student, "cpu", section)


def teach(task: Task, data: contest.Task) -> float:
    """Compute the teacher's values of a data set; return the CPU seconds of the command."""
    settings = data.resolved({}, {}, {})["runs"]["default"]["teacher"]
    output = data.folder / "teacher"
    shutil.rmtree(output, ignore_errors=True)
    paths = {
        "data": data.data,
        "student": data.folder / "models/model",
        "weights": task.folder / "weights/teacher.json",
    }
    options = [text for name, path in {**paths, "output": output}.items() for text in (f"--{name}", str(path))]
    before = children_cpu_seconds()
    command = [sys.executable, "-m", "zerolora", "stage", "teacher", "--settings", canonical(settings), *options]
    finished([command], [{"OMP_NUM_THREADS": "1"}], data.folder)
    return children_cpu_seconds() - before


def ours(task: Task) -> dict[str, float]:
    """Run the stage teacher, and train."""
    whole, few = teach(task, task.whole), teach(task, task.few)
    teacher = (whole - few) * ROWS / (ROWS - BATCH)
    train = {**TRAIN, "global_batch": BATCH, "micro_batch": BATCH, "ranks_per_node": 1}
    used = []
    for epochs in (1, 2):
        folder = task.whole.folder / f"ours-{epochs}"
        training = Ours(task.whole, folder, {**train, "epochs": epochs}, {}, "ddp", "1")
        command = [*training.command(), "--teacher", str(task.whole.folder / "teacher")]
        before = children_cpu_seconds()
        finished([command], [{"OMP_NUM_THREADS": "1"}], folder)
        used.append(children_cpu_seconds() - before)
    peak = read_json(folder / "run/metrics/train_resources.json", "train")["peak_host_bytes_all_ranks"]
    student = used[1] - used[0]
    return {"cpu_seconds": teacher + student, "teacher_cpu_seconds": teacher, "peak_host_bytes": peak}


def trl(task: Task, kernels: bool) -> dict[str, float]:
    """Train with TRL in a process of its own."""
    folder = task.folder / "trl"
    settings = folder / "settings.json"
    rows = open_split(task.whole.data, "train")
    texts = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    texts.sort(key=lambda row: -len(row["input_ids"]))
    values = {"student": str(task.student), "teacher": str(task.teacher), "rows": texts, "kernels": kernels}
    write_json(settings, values | {"folder": str(folder)})
    finished([[sys.executable, __file__, "--peer", str(settings)]], [{"OMP_NUM_THREADS": "1"}], folder)
    lines = (folder / "process0.log").read_text(encoding="utf-8", errors="replace").splitlines()
    result: dict[str, float] = json.loads(next(line for line in reversed(lines) if line.startswith('{"cpu_seconds"')))
    return result


def swift(task: Task, kernels: bool) -> dict[str, float]:
    """Train with ms-swift in a process of its own. Raises SystemExit if it trains other tokens."""
    folder = task.folder / "swift"
    folder.mkdir(exist_ok=True)
    lengths = open_split(task.whole.data, "train")["length"]
    lines = (task.whole.folder / "rows/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    order = sorted(range(len(lines)), key=lambda row: -lengths[row])
    rows, steps = folder / "rows.jsonl", ROWS // BATCH
    rows.write_text("".join(lines[row] for row in order), encoding="utf-8")
    settings = of_trainer(folder, steps, TRAIN, 1000) | of_swift(task.student, rows) | {
        "rlhf_type": "gkd", "teacher_model": str(task.teacher), "teacher_model_type": "llama", "lmbda": 0, "beta": 0,
        "temperature": 1, "gkd_logits_topk": TOP_K, "sft_alpha": 0, "loss_scale": "default",
        "per_device_train_batch_size": BATCH,
    }  # fmt: skip
    (rank,) = ranks_of_peer("swift-gkd", task.options.swift, folder, settings, kernels, ranks=1)
    trained = {name: sum(rank[name][-steps:]) for name in ("tokens", "supervised")}
    if trained != {name: task.counts[name] for name in trained}:
        raise SystemExit(f"ms-swift trains {trained}, and zerolora {task.counts}")
    seconds = rank["cpu_seconds"]
    return {"cpu_seconds": seconds[-1] - seconds[-1 - steps], "peak_host_bytes": rank["peak_host_bytes"][0]}


def trl_in_this_process(settings: dict[str, Any]) -> dict[str, float]:
    """Train two epochs with TRL's GKDTrainer; return the CPU seconds of the second, and the peak of memory."""
    import psutil
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from zerolora.machine import cpu_matmul

    if settings["kernels"]:
        cpu_matmul.choose()
    tokenizer: Any = AutoTokenizer.from_pretrained(settings["student"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(settings[name], dtype=torch.float32) for name in ("student", "teacher")
    )
    ends: list[float] = []
    peaks: list[int] = []

    class Watch(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())
            peaks.append(psutil.Process().memory_info().rss)

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in rows)
        fills = {"input_ids": tokenizer.pad_token_id, "labels": IGNORED}
        batch = {
            name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
            for name, fill in fills.items()
        }
        lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
        return batch | {
            "attention_mask": (torch.arange(longest) < lengths).long(),
            "prompts": batch["input_ids"][:, :1],
        }

    arguments = GKDConfig(
        output_dir=settings["folder"], lmbda=0.0, beta=0.0, temperature=1.0, num_train_epochs=2,
        per_device_train_batch_size=BATCH, learning_rate=TRAIN["learning_rate"], lr_scheduler_type="constant",
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    lora = LoraConfig(
        r=LORA["r"], lora_alpha=LORA["alpha"], lora_dropout=0.0, target_modules=LORA["targets"], task_type="CAUSAL_LM"
    )
    trainer = GKDTrainer(
        student, teacher, args=arguments, data_collator=collated, train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=tokenizer, peft_config=lora, callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    return {"cpu_seconds": ends[1] - ends[0], "peak_host_bytes": max(peaks)}


if __name__ == "__main__":
    main()
