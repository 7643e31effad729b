"""One rank of a peer, in the peer's own environment: peers.py llamafactory|swift FOLDER [--onednn], with RANK …

It imports nothing of zerolora. FOLDER/settings.json has LLaMA-Factory's keys, or the options of `swift sft`. Both get a
ChatML template named `rows`: without the newline that their own train after each turn, since zerolora and TRL train
none. --onednn: with the fp32 matmul kernels that zerolora chooses on a CPU (machine/cpu_matmul.py). Writes the CPU
seconds of this process at the end of every step, and its tokens, supervised tokens and loss, to FOLDER/rank<N>.json.
The loss is this rank's sum over the supervised tokens of the step's global batch, times the number of ranks, as
transformers' Trainer has it before ranks are averaged.
"""

import json
import os
import sys
import time
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
    columns: dict[str, list[float]] = {name: [] for name in ("cpu_seconds", "tokens", "supervised", "losses")}
    on_step_end, training_step = CallbackHandler.on_step_end, Trainer.training_step

    def noted(*arguments: Any, **named: Any) -> Any:
        columns["cpu_seconds"].append(time.process_time())
        return on_step_end(*arguments, **named)

    def counted(trainer: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        columns["tokens"].append(int(inputs["attention_mask"].sum()))
        columns["supervised"].append(int((inputs["labels"][:, 1:] != -100).sum()))
        loss = training_step(trainer, model, inputs, *arguments, **named)
        columns["losses"].append(float(loss))
        return loss

    for owner, name, replaced in ((CallbackHandler, "on_step_end", noted), (Trainer, "training_step", counted)):
        setattr(owner, name, replaced)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    {"llamafactory": llamafactory, "swift": swift}[kind](settings)
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
    from swift.template import TemplateMeta, register_template

    register_template(
        TemplateMeta(
            "rows", prefix=[], prompt=[USER.format("{{QUERY}}")], chat_sep=[END], suffix=[END],
            system_prefix=[SYSTEM.format("{{SYSTEM}}")],
        )
    )  # fmt: skip
    sft_main([text for name, value in settings.items() for text in (f"--{name}", str(value))])


if __name__ == "__main__":
    main()
