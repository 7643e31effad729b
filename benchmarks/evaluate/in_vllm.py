"""Time vLLM's answers, in the Python environment that has vLLM: python -I in_vllm.py REQUEST.

generation.py and sampling.py write the request: zerolora's arguments for vLLM, prompts, stop tokens, and for a sample
arguments of its draws and a seed of each prompt. Two prompts are answered before the timing starts.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

Prompts = list[list[int]]


def main(path: Path) -> None:
    """Load, answer, write tokens and times."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    request = json.loads(path.read_text(encoding="utf-8"))
    engine = LLMEngine.from_engine_args(EngineArgs(**request["engine"]))
    common = {
        **request.get("drawing", {"temperature": 0.0}), "max_tokens": request["limit"],
        "stop_token_ids": request["stops"], "ignore_eos": True, "detokenize": False,
    }  # fmt: skip
    prompts = request["prompts"]
    sampling = [SamplingParams(**common, seed=seed) for seed in request.get("seeds", [None] * len(prompts))]
    answered(engine, prompts[-2:], sampling)
    engine.reset_prefix_cache()
    started, before = time.monotonic(), time.process_time()
    answers = answered(engine, prompts, sampling)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - before
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "answers": answers}
    Path(request["figures"]).write_text(json.dumps(figures), encoding="utf-8")


def answered(engine: Any, prompts: Prompts, sampling: list[Any]) -> Prompts:
    """Return the tokens of the answers, in the prompts' order."""
    for index, tokens in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": tokens}, sampling[index])
    result: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        result |= {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    return [result[index] for index in range(len(prompts))]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
