"""Distilled tokens a CPU second by the stages `teacher` and `train`, and by TRL's GKDTrainer, in turn.

    .venv/bin/python benchmarks/train/distillation_peers.py

Student and teacher are two models of SmolLM2-135M's shape with random weights, since only speed is compared. TRL has no
stored probabilities: its trainers call the teacher in every step, and compare whole vocabularies. GKDTrainer distils on
given answers with lmbda: 0, and beta: 0 is the forward divergence, which is zerolora's with alpha: 0. Both train the
same LoRA adapter on the same global batches of eight rows of similar length, in one process of one thread, in fp32
without activation checkpointing. TRL computes fp32 products once as installed, and once by the kernels that zerolora
chooses. Its trainer for answers of the student, DistillationTrainer, has no given answers, and is not compared.

CPU seconds are those of the second of two epochs, so loading and the first use of kernels do not count: for zerolora
the difference of trainings of two epochs and of one with all their processes, for TRL as its process counts its own.
The stage `teacher` is timed as the difference of all rows and of one global batch, and counts in whole, as if its
values served a single epoch of a single run. Writes benchmarks/results/distillation_peers.json.
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
from contest import LORA, TRAIN, Ours, about, finished
from measuring import RESULTS, ROOT, by_round, children_cpu_seconds, parser_of, random_model, turns

from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.files import canonical, read_json, write_json

ROWS, BATCH, LONGEST, ROUNDS = 48, 8, 96, 2
CONFIG = ROOT / "config/recipes/models/smollm2-135m.json"
TOP_K = 64
OURS = "zerolora"
KERNELS = "zerolora's kernels"


def main() -> None:
    """Take turns, compare, write."""
    made = parser_of(__doc__)
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--layers", type=int, default=30)
    made.add_argument("--peer", type=Path, help="settings of a training by TRL in this process")
    made.add_argument("--output", type=Path, default=RESULTS / "distillation_peers.json")
    options = made.parse_args()
    if options.peer:
        print(json.dumps(trl_in_this_process(json.loads(options.peer.read_text(encoding="utf-8")))))
        return
    with tempfile.TemporaryDirectory() as name:
        task = Task(Path(name), options)
        runs: dict[str, list[dict[str, float]]] = {OURS: [], "TRL": [], f"TRL, {KERNELS}": []}
        result = about("cpu", ("trl",)) | {"rows": ROWS, "top_k": TOP_K, "layers": options.layers, **task.counts}
        for number, contestant in enumerate(turns(runs, options.rounds), 1):
            runs[contestant].append(ours(task) if contestant == OURS else trl(task, KERNELS in contestant))
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
        "tokens_a_cpu_second": by_round([task.counts["supervised"] / each["cpu_seconds"] for each in runs])
    }


class Task:
    """Student, teacher and rows."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, models = folder, {}
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
        contest.write_chat(folder / "rows/train.jsonl", rows, longest=LONGEST)
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
