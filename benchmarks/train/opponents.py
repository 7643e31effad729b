"""One rank of another trainer: opponents.py trl|trl_rows|reference FOLDER, with RANK and the other variables.

`trl` is TRL's SFTTrainer on conversations, `trl_rows` on prepared rows, with the loss of those held out; `reference`
is the published experiment's way: transformers' Trainer with peft's adapter, on rows padded to fixed lengths. Reads
FOLDER/settings.json and writes to FOLDER/rank<N>.json, for every optimizer step, the time at its end, its real
tokens, its supervised tokens and the sum of their losses, and the memory peaks.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.files import read_json, write_json
from zerolora.machine import cpu_matmul
from zerolora.machine.peak_memory import PeakMemory
from zerolora.train.engines.engine import DTYPES


class Clock(TrainerCallback):
    """Counts tokens and times of a trainer's steps without synchronizing them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        """Times of training's start and of every step's end."""
        self.cpu_seconds: list[float] = []
        """CPU seconds of this process by then."""
        self.counts: list[torch.Tensor] = []
        """By micro-step: its step, real tokens, supervised tokens, sum of losses."""

    def counting(self, trainer: Any) -> None:
        """Count the steps of a trainer."""
        compute_loss = trainer.compute_loss

        def counted(model: Any, inputs: dict[str, Any], **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
            supervised = (inputs["labels"][:, 1:] != IGNORED).sum()
            loss = compute_loss(model, inputs, **named)
            # Trainers divide by the step's supervised tokens of all ranks, and multiply by the ranks that DDP averages.
            share = named["num_items_in_batch"] / trainer.accelerator.num_processes
            row = (len(self.ends) - 1, tokens, supervised, (loss.detach() * share))
            self.counts.append(torch.stack([torch.as_tensor(value, device=loss.device).double() for value in row]))
            return loss

        trainer.compute_loss = counted
        trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())
        self.cpu_seconds.append(time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.time())
        self.cpu_seconds.append(time.process_time())

    def result(self) -> dict[str, Any]:
        """Return the steps' columns."""
        counts = torch.stack(self.counts).cpu()
        sums = torch.zeros(len(self.ends) - 1, 3, dtype=torch.float64).index_add_(0, counts[:, 0].long(), counts[:, 1:])
        tokens, supervised, losses = sums.T.tolist()
        counted = {"tokens": tokens, "supervised": supervised, "losses": losses}
        return {"ends": self.ends, "cpu_seconds": self.cpu_seconds, **counted}


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("trl", "trl_rows", "reference"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    settings = read_json(options.folder / "settings.json", "contest.py")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if settings["device"] == "cuda" else torch.device("cpu")
    if settings["onednn"]:
        cpu_matmul.choose()
    memory, clock = PeakMemory(device), Clock()
    trainer = {"trl": trl, "trl_rows": trl_rows, "reference": reference}[options.kind](settings, options.folder)
    clock.counting(trainer)
    trainer.train()
    peaks = {"peak_host_bytes": memory.host(), "peak_gpu_bytes": memory.gpu()}
    result = {**clock.result(), **peaks}
    if options.kind == "trl_rows":
        result["loss_validation"] = held_out(trainer.model, Path(settings["data"]))
    write_json(options.folder / f"rank{os.environ['RANK']}.json", result)


def trl(settings: dict[str, Any], folder: Path) -> Any:
    """Return TRL's trainer on conversations, with loss on the assistant's turns."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.chat_template = settings["template"]
    rows = load_dataset("json", data_files=settings["rows"], cache_dir=str(folder / "cache"), split="train")
    return SFTTrainer(
        loaded(settings),
        SFTConfig(**arguments(settings, folder), assistant_only_loss=True, **settings["sft"]),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora(settings),
    )


def trl_rows(settings: dict[str, Any], folder: Path) -> Any:
    """Return TRL's trainer on prepared rows, in its own order."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = open_split(Path(settings["data"]), "train")
    columns = {name: [list(row[name]) for row in rows] for name in ("input_ids", "labels")}
    return SFTTrainer(
        loaded(settings),
        SFTConfig(**arguments(settings, folder), max_length=None),
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=lora(settings),
    )


def held_out(model: Any, data: Path) -> float:
    """Return the mean loss of the supervised tokens of the validation rows, row by row."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in open_split(data, "validation"):
            given, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
            logits = model(input_ids=given[None]).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum"))
            tokens += int((labels[1:] != IGNORED).sum())
    return total / tokens


def reference(settings: dict[str, Any], folder: Path) -> Any:
    """Return transformers' trainer on prepared rows whose prompts and answers are padded to fixed lengths."""
    import deepspeed
    from peft import get_peft_model

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled on first use, for minutes
    rows = open_split(Path(settings["data"]), "train")
    rows = [padded(row, *settings["padded"]) for row in rows]
    torch.manual_seed(settings["seed"])
    model = get_peft_model(loaded(settings), lora(settings))
    if settings["gradient_checkpointing"]:
        model.enable_input_require_grads()
    return Trainer(model, TrainingArguments(**arguments(settings, folder)), train_dataset=rows)


def padded(row: dict[str, Any], prompt: int, answer: int) -> dict[str, list[int]]:
    tokens, labels = row["input_ids"], row["labels"]
    first = next(index for index, label in enumerate(labels) if label != IGNORED)
    assert first <= prompt and len(tokens) - first <= answer, "a row is longer than its padded length"
    left, right = [0] * (prompt - first), [0] * (answer - len(tokens) + first)
    ignored = [IGNORED] * len(left)
    return {
        "input_ids": tokens[:first] + left + tokens[first:] + right,
        "attention_mask": [1] * first + left + [1] * (len(tokens) - first) + right,
        "labels": [IGNORED] * first + ignored + labels[first:] + [IGNORED] * len(right),
    }


def loaded(settings: dict[str, Any]) -> Any:
    """Return the base model with the attention of the settings."""
    return AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=DTYPES[settings["precision"]], attn_implementation=settings["attention"]
    )


def lora(settings: dict[str, Any]) -> Any:
    """Return the adapter's config."""
    from peft import LoraConfig

    wanted = settings["lora"]
    return LoraConfig(
        task_type="CAUSAL_LM", r=wanted["r"], lora_alpha=wanted["alpha"], lora_dropout=wanted["dropout"],
        target_modules=wanted["targets"],
    )  # fmt: skip


def arguments(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of both trainers: our settings in their names, without saving and evaluation."""
    on_cpu = settings["device"] == "cpu"
    return {
        "output_dir": str(folder / "output"), "max_steps": settings["max_steps"], "num_train_epochs": 1,
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": settings["accumulation"],
        "learning_rate": settings["learning_rate"], "lr_scheduler_type": settings["schedule"],
        "weight_decay": settings["weight_decay"], "max_grad_norm": settings["gradient_clipping"],
        "optim": "adamw_torch", "bf16": settings["precision"] == "bf16", "fp16": settings["precision"] == "fp16",
        "use_cpu": on_cpu,
        "gradient_checkpointing": settings["gradient_checkpointing"], "seed": settings["seed"],
        "deepspeed": settings.get("deepspeed"), "ddp_backend": "gloo" if on_cpu else "nccl",
        "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


if __name__ == "__main__":
    main()
