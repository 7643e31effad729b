"""Sample with ms-swift, in its own Python environment: python in_swift.py REQUEST.

sampling.py writes the request. `swift sample` is run by its own pipeline, whose sampler answers two prompts before the
timing starts: its template, its engine and its generation, with the answers as lines of its output file. It stops
unless ms-swift's prompts have the tokens of zerolora's.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BEFORE = 2
"""Prompts that are answered before the timing."""


def main(path: Path) -> None:
    """Load, sample, write the figures."""
    request = json.loads(path.read_text(encoding="utf-8"))
    if request["kernels"]:
        os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    import torch
    from swift.arguments import SamplingArguments
    from swift.pipelines.sampling.vanilla_sampler import VanillaSampler
    from swift.template import TemplateMeta, register_template

    if request["kernels"]:
        torch.set_float32_matmul_precision("medium")
    vllm = request["engine"] == "vllm"
    register_template(
        TemplateMeta(
            "asked", prefix=[], prompt=["<|im_start|>user\n{{QUERY}}<|im_end|>\n<|im_start|>assistant\n"],
            chat_sep=["<|im_end|>\n"], suffix=["<|im_end|>"],
            system_prefix=["<|im_start|>system\n{{SYSTEM}}<|im_end|>\n"],
        )
    )  # fmt: skip
    options = {
        "model": request["model"], "model_type": "llama", "template": "asked", "torch_dtype": "float32",
        "sampler_engine": request["engine"], "num_return_sequences": request["n"], "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "max_new_tokens": request["limit"], "output_dir": str(path.parent / "swift"),
        "dataset": request["rows"],
        "engine_kwargs": json.dumps({**request["engine_kwargs"], "template_type": "asked"}),
    }  # fmt: skip
    sampler = VanillaSampler(SamplingArguments(**options))
    engine = sampler.infer_engine
    rows = [json.loads(line) for line in Path(request["rows"]).read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: -len(row["tokens"]))
    check(engine.template, rows)
    if not vllm:
        engine.generation_config.eos_token_id = request["stops"]
    counted = [0]
    infer = engine.infer

    def counting(*given: Any, **named: Any) -> Any:
        responses = infer(*given, **named)
        counted[0] += sum(response.usage.completion_tokens for response in responses)
        return responses

    engine.infer = counting
    sampler.do_sample(data_of(rows[-BEFORE:]))
    if vllm:
        engine.engine.reset_prefix_cache()
    counted[0] = 0
    started, before = time.monotonic(), time.process_time()
    lines = sampler.do_sample(data_of(rows))
    seconds, cpu = time.monotonic() - started, time.process_time() - before
    if len(lines) != len(rows) * request["n"]:
        raise SystemExit(f"{len(lines)} answers to {len(rows)} prompts")
    figures = {"seconds": seconds, "cpu_seconds": cpu, "answers": len(lines), "tokens": counted[0]}
    Path(request["output"]).write_text(json.dumps(figures), encoding="utf-8")


def data_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as the pipeline's slices of a data set."""
    answer = {"role": "assistant", "content": "-"}
    return {"messages": [[*row["messages"], answer] for row in rows]}


def check(template: Any, rows: list[dict[str, Any]]) -> None:
    """Raise SystemExit if a prompt has other tokens than zerolora's."""
    for row in rows:
        encoded = list(template.encode({"messages": row["messages"]})["input_ids"])
        if encoded != row["tokens"]:
            raise SystemExit(f"ms-swift has {encoded[:20]} …, and zerolora {row['tokens'][:20]} …")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
