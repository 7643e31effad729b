"""Train a chat set of mixed lengths with `zerolora stage train` and with TRL's SFTTrainer, in turn, and compare.

    .venv/bin/python benchmarks/train/against_trl.py
    .venv/bin/python benchmarks/train/against_trl.py --device cuda --model config/recipes/models/qwen2.5-0.5b.json \\
        --capacity 4096 --batch 8 --steps 20 --output benchmarks/results/train_trl_gpu.json

Needs the base model: run `make run` first. Both train the same adapter on the same conversations (chat_rows.py), with
loss on the assistant's turns, the same optimizer, learning rate and precision, without activation checkpointing,
evaluation or checkpoints. First each trainer's options are tried once: with packing and without, on one process and
on several, implementations of attention; on a GPU with liger-kernel and without, if it is installed. On a CPU TRL
gets zerolora's fp32 matmul kernels (zerolora/machine/cpu_matmul.py), which are not its own. The fastest of each then
take turns, and those without liger-kernel. A step is --batch packed rows of --capacity tokens; without packing, as
many rows as fill them on average. Only real tokens of the steps after --warm-up are counted, without loading and
preparing. That both train the same shows in the result: supervised tokens over all tokens, and the mean loss. Writes
benchmarks/results/train_trl.json.
"""

import argparse
import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_rows import CHATML
from contest import (
    LORA,
    TRAIN,
    Run,
    Task,
    about,
    chat_task,
    model_of,
    opponent,
    parser,
    ranks_of,
    ratio,
    summary,
    take_turns,
)
from transformers import AutoTokenizer

from zerolora.files import write_json

ROWS = {"train": 600, "validation": 8, "test": 8}
PACKED = {"packing": True, "packing_strategy": "bfd"}
FUSED = ", liger"  # the end of the labels of runs with liger-kernel
Contestants = dict[str, Callable[[], Run]]


def main() -> None:
    """Try settings, take turns, compare, write."""
    made = parser(__doc__, "train_trl.json")
    chat_options(made, batch=2)
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = mixed_task(folder, model_of(options, folder), options)
        result = about(task.device, ("trl",)) | {
            "model": options.model.stem, "precision": options.precision, "lora": LORA, "train": TRAIN,
            "data": task.stats, "capacity": options.capacity, "packed_rows_a_step": options.batch,
            "steps": options.steps, "warm_up": options.warm_up,
        }  # fmt: skip
        ours, theirs = our_settings(task, options), their_settings(task, options)
        tried = {label: take_turns({label: run}, 1)[label][0] for label, run in [*theirs.items(), *ours.items()]}
        rates = {label: run.tokens_per_second(options.warm_up) for label, run in tried.items()}

        def fastest(fused: bool) -> dict[str, Any]:
            """Compare the fastest of each; without liger-kernel unless `fused`."""
            best, rival = (
                max((label for label in labels if fused or not label.endswith(FUSED)), key=rates.__getitem__)
                for labels in (ours, theirs)
            )
            runs = take_turns({best: ours[best], rival: theirs[rival]}, options.rounds)
            return compared(best, runs[best], rival, runs[rival], options.warm_up)

        result |= {"tried": rates, **fastest(fused=True)}
        if any(label.endswith(FUSED) for label in rates):
            result["without_liger"] = fastest(fused=False)
        write_json(options.output, result)
        print(json.dumps({name: result[name] for name in ("speed", "gpu_memory", "host_memory")}))


def mixed_task(folder: Path, model: Path, options: argparse.Namespace) -> Task:
    """Return the chat task of the options."""
    return chat_task(folder, model, options.device, ROWS, options.capacity, longest=options.longest)


def our_settings(task: Task, options: argparse.Namespace) -> Contestants:
    """Return zerolora's options: one process or one a core; on a GPU one or several packed rows at a time, with
    liger-kernel and without."""
    steps = {"max_steps": options.steps, "global_batch": options.batch, "precision": options.precision}
    pack = {"packing": True, "capacity": options.capacity}
    return {
        f"zerolora, {ranks} ranks, micro-batch {micro}{FUSED if kernels == 'auto' else ''}": task.ours(
            f"ours-{ranks}-{micro}-{kernels}",
            {**TRAIN, **steps, "ranks_per_node": ranks, "micro_batch": micro, "kernels": kernels},
            pack,
        ).train
        for ranks in ranks_of(task.device)
        for micro in micro_batches(task.device, options.batch // ranks)
        for kernels in (("off", "auto") if has_liger(task.device) else ("off",))
    }


def their_settings(task: Task, options: argparse.Namespace) -> Contestants:
    """Return TRL's options: packing, and padded batches of rows of similar length, in several ways each."""
    mean = task.stats["train_tokens"] / task.stats["train_rows"]
    rows_a_step = round(options.batch * options.capacity / mean)
    made: Contestants = {}
    for ranks in ranks_of(task.device):
        for attention in attentions(task.device):
            for micro in micro_batches(task.device, options.batch // ranks):
                share = (micro, options.batch // (micro * ranks))
                label = f"TRL, {ranks} ranks, packing, {attention}, micro-batch {micro}"
                made[label] = _trl(task, options, label, ranks, attention, share, PACKED)
        rows = 4 if task.device == "cpu" else 16
        label = f"TRL, {ranks} ranks, padding, micro-batch {rows}"
        share = (rows, max(1, round(rows_a_step / (rows * ranks))))
        made[label] = _trl(task, options, label, ranks, "sdpa", share, {"train_sampling_strategy": "group_by_length"})
    if task.device == "cpu":
        label = "TRL, 1 ranks, packing, sdpa, products by MKL"
        made[label] = _trl(task, options, label, 1, "sdpa", (1, options.batch), PACKED, onednn=False)
    if has_liger(task.device):
        liger = {**PACKED, "use_liger_kernel": True}
        for attention in attentions(task.device):
            label = f"TRL, 1 ranks, packing, {attention}{FUSED}"
            made[label] = _trl(task, options, label, 1, attention, (1, options.batch), liger)
    return made


def _trl(
    task: Task, options: argparse.Namespace, label: str, ranks: int, attention: str, share: tuple[int, int],
    sft: dict[str, Any], onednn: bool = True,
) -> Callable[[], Run]:  # fmt: skip
    settings = {
        **TRAIN, "model": str(task.model), "rows": str(task.folder / "rows/train.jsonl"), "device": task.device,
        "template": template(task.model), "precision": options.precision, "attention": attention, "lora": LORA,
        "micro_batch": share[0], "accumulation": share[1], "max_steps": options.steps,
        "gradient_checkpointing": False, "sft": {"max_length": options.capacity, **sft},
        "onednn": onednn and task.device == "cpu",
    }  # fmt: skip
    return functools.partial(opponent, "trl", task.folder / label.replace(" ", ""), settings, ranks)


def micro_batches(device: str, most: int) -> list[int]:
    """Return the packed rows of a forward pass to try: one on a CPU, where more are not faster."""
    return [1] if device == "cpu" else [micro for micro in (1, 4) if micro <= most]


def has_liger(device: str) -> bool:
    """Return whether runs with liger-kernel are compared, too."""
    return device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def attentions(device: str) -> list[str]:
    """Return the implementations of attention that keep packed rows apart and are installed."""
    if device == "cpu":
        return ["sdpa"]  # flex attention has no backward there
    return ["sdpa", "flex_attention", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


def template(model: Path) -> str:
    """Return a model's ChatML template with TRL's marks. Raises ValueError for another template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    marked = json.dumps(text[: text.index("<|im_start|>user")]).join(["{{ ", " }}"]) + CHATML
    if tokenizer.apply_chat_template(turns, tokenize=False, chat_template=marked) != text.rstrip("\n"):
        raise ValueError(f"{model}: its chat template is not ChatML; name another model")
    return marked


def compared(best: str, ours: list[Run], rival: str, theirs: list[Run], warm_up: int) -> dict[str, Any]:
    """Return both contestants, and the ratios of ours to theirs: speed and memory peaks."""
    return {
        "ours": {"label": best, **summary(ours, warm_up)},
        "theirs": {"label": rival, **summary(theirs, warm_up)},
        "speed": ratio(ours, theirs, lambda run: run.tokens_per_second(warm_up)),
        "host_memory": ratio(ours, theirs, lambda run: run.peak_host_bytes),
        "gpu_memory": ratio(ours, theirs, lambda run: run.peak_gpu_bytes) if ours[0].peak_gpu_bytes else None,
    }


def chat_options(made: argparse.ArgumentParser, batch: int) -> None:
    """Add the options of the chat task."""
    made.add_argument("--capacity", type=int, default=2048, help="tokens of a packed row")
    made.add_argument("--longest", type=int, default=600, help="words of a conversation")
    made.add_argument("--batch", type=int, default=batch, help="packed rows of an optimizer step")


if __name__ == "__main__":
    main()
