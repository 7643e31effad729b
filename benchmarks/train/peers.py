"""One rank of a peer, in the peer's own environment: peers.py KIND FOLDER [--onednn], with RANK …

KIND: llamafactory, swift (`swift sft`), swift-rlhf, swift-gkd or trl-dpo. It imports nothing of zerolora.
FOLDER/settings.json has LLaMA-Factory's keys, the options of ms-swift's command, or for TRL `model`, `rows`,
`template`, `lora` and the arguments of its DPOConfig. LLaMA-Factory and ms-swift get a ChatML template named `rows`:
without the newline that their own train after each turn, since zerolora and TRL train none. --onednn: with the fp32
matmul kernels that zerolora chooses on a CPU (machine/cpu_matmul.py).

Writes the CPU seconds of this process at the end of every step, its tokens, supervised tokens and loss, what the
trainer logs, and its peak memory (VmHWM since its libraries are imported), to FOLDER/rank<N>.json. With next-token loss
the loss is this rank's sum over the supervised tokens of the step's global batch, times the number of ranks, as
transformers' Trainer has it before ranks are averaged.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END = "<|im_end|>"
SYSTEM = "<|im_start|>system\n{}" + END
USER = "\n<|im_start|>user\n{}" + END + "\n<|im_start|>assistant\n"


def main() -> None:
    """Train once."""
    onednn = "--onednn" in sys.argv
    if onednn:
        os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    import torch
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    if onednn:
        torch.set_float32_matmul_precision("medium")
    columns: dict[str, list[Any]] = {name: [] for name in ("cpu_seconds", "tokens", "supervised", "losses", "logs")}
    on_step_end, training_step, on_log = CallbackHandler.on_step_end, Trainer.training_step, CallbackHandler.on_log

    def noted(*arguments: Any, **named: Any) -> Any:
        columns["cpu_seconds"].append(time.process_time())
        return on_step_end(*arguments, **named)

    def count(inputs: dict[str, Any]) -> None:
        columns["tokens"].append(int(inputs["attention_mask"].sum()))
        answers = inputs["completion_mask"] == 1 if "completion_mask" in inputs else inputs["labels"] != -100
        columns["supervised"].append(int(answers[:, 1:].sum()))

    def counted(trainer: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(inputs, list):  # GKD's are rows
            count(inputs)
        loss = training_step(trainer, model, inputs, *arguments, **named)
        columns["losses"].append(float(loss))
        return loss

    def logged(handler: Any, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **named: Any) -> Any:
        columns["logs"].append({name: value for name, value in logs.items() if isinstance(value, int | float)})
        return on_log(handler, arguments, state, control, logs, **named)

    hooks: dict[str, Any] = {"on_step_end": noted, "training_step": counted, "on_log": logged}
    for name, replaced in hooks.items():
        setattr(Trainer if name == "training_step" else CallbackHandler, name, replaced)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins here (man 5 proc)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    kinds = {"llamafactory": llamafactory, "swift": swift, "swift-rlhf": swift_rlhf, "trl-dpo": trl_dpo}
    if kind == "swift-gkd":
        swift_gkd(settings, count)
    else:
        kinds[kind](settings)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    columns["peak_host_bytes"] = [int(status.split("VmHWM:")[1].split()[0]) * 1024]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(columns), encoding="utf-8")


def llamafactory(settings: dict[str, Any]) -> None:
    from llamafactory.data.formatter import StringFormatter
    from llamafactory.data.template import register_template
    from llamafactory.train.tuner import run_exp

    def formatter(text: str) -> Any:
        return StringFormatter(slots=[text.format("{{content}}")])

    register_template(
        name="rows", format_user=formatter(USER), format_assistant=formatter("{}" + END),
        format_system=formatter(SYSTEM), stop_words=[END], replace_eos=True, replace_jinja_template=True,
    )  # fmt: skip
    run_exp(settings)


def swift(settings: dict[str, Any]) -> None:
    from swift.pipelines import sft_main

    sft_main(_swift_options(settings))


def swift_rlhf(settings: dict[str, Any]) -> None:
    from swift.pipelines import rlhf_main

    rlhf_main(_swift_options(settings))


def swift_gkd(settings: dict[str, Any], count: Callable[[dict[str, Any]], None]) -> None:
    """Distil, with `count` called on the tensors of each micro-batch."""
    from swift.rlhf_trainers.gkd_trainer import GKDTrainer

    compute_loss = GKDTrainer.compute_loss

    def counted(trainer: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        count(inputs["model_inputs"])
        return compute_loss(trainer, model, inputs, *arguments, **named)

    GKDTrainer.compute_loss = counted
    GKDTrainer.shuffle_dataset = False  # an attribute that it reads and, unlike GRPOTrainer, never sets
    swift_rlhf(settings)


def _swift_options(settings: dict[str, Any]) -> list[str]:
    """Register the template, and return settings as options."""
    from swift.template import TemplateMeta, register_template

    register_template(
        TemplateMeta(
            "rows", prefix=[], prompt=[USER.format("{{QUERY}}")], chat_sep=[END], suffix=[END],
            system_prefix=[SYSTEM.format("{{SYSTEM}}")],
        )
    )  # fmt: skip
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def trl_dpo(settings: dict[str, Any]) -> None:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model, rows, template, lora = (settings.pop(name) for name in ("model", "rows", "template", "lora"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    DPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        args=DPOConfig(**settings),
        train_dataset=load_dataset("json", data_files=rows, cache_dir=f"{settings['output_dir']}-cache", split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora),
    ).train()


if __name__ == "__main__":
    main()
