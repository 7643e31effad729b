"""Measure how many answers are sampled in a CPU second, by zerolora and by TRL.

    .venv/bin/python benchmarks/evaluate/sampling.py

Needs the base model: run `make run` first. Each contestant draws --n answers to each prompt of a chat set, at
temperature 1, in fp32, in its own process, which loads, samples two prompts, and is timed from there:

- TRL: GRPOTrainer's own generation (`_generate_single_turn`), by transformers' generate and by continuous batching, on
  prompts sorted by length, which its trainer leaves out, with each of --batches answers at a time, and with the fp32
  kernels that zerolora chooses on a CPU (machine/cpu_matmul.py). The best batch by generate counts;
- zerolora: as `zerolora stage sample` does, with batch auto.

They take turns in --rounds rounds. Writes benchmarks/results/sampling.json and puts its table into docs/sampling.md.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import torch
from contest import MODEL, QUIET, about, chat_task
from measuring import RESULTS, medians, parser_of, put, table, turns

from zerolora.config.settings import PrepareSettings, SampleSettings
from zerolora.data.prepare import prepare
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
from zerolora.files import read_json, write_json
from zerolora.machine import cpu_matmul
from zerolora.sample.answering import draw_answers
from zerolora.sample.prompt_batches import AskedPrompt, batches_of, read_prompts
from zerolora.units import counted

RESULT = RESULTS / "sampling.json"
OURS, TRL, CONTINUOUS = "zerolora", "TRL, generate", "TRL, continuous batching"
FIGURES = ("seconds", "cpu_seconds", "answers_per_cpu_second", "tokens_per_cpu_second", "tokens")
PAGE = 256
"""Positions of a block of the cache of continuous batching."""
Result = dict[str, Any]


def main() -> None:
    """Time all contestants, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a directory with weights")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 192], help="answers at a time, of TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each contestant")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = chat_task(folder, options.model.resolve(), "cpu", {"train": options.prompts}, 1024, longest=200)
        rows = task.resolved({}, {}, {})["prepare"]["rows"] | {"prompts": True}
        prepare(PrepareSettings.model_validate(rows), folder / "models/model/manifest.json", folder / "asked")
        lengths = [len(prompt.tokens) for prompt in read_prompts(folder / "asked")]
        request = {
            "model": str(options.model.resolve()), "data": str(folder / "asked"), "n": options.n,
            "limit": options.max_new_tokens, "threads": options.threads,
        }  # fmt: skip
        names = [*(f"{TRL} {batch}" for batch in options.batches), CONTINUOUS, OURS]
        rounds: dict[str, list[Result]] = {name: [] for name in names}
        for name in turns(names, options.rounds):
            rounds[name].append(sampled(name, request, folder))
            print(f"{name}: {rounds[name][-1]['answers_per_cpu_second']:.3f} answers/CPU s", flush=True)
    result = about("cpu", ("trl",)) | {
        "model": options.model.name, "prompts": len(lengths), "n": options.n, "max_new_tokens": options.max_new_tokens,
        "threads": options.threads, "prompt_tokens": {"mean": sum(lengths) / len(lengths), "longest": max(lengths)},
        "contestants": {name: {**medians(figures), "rounds": figures} for name, figures in rounds.items()},
    }  # fmt: skip
    write_json(RESULT, result)
    put("sampling.md", "speed", section(result))


def sampled(name: str, request: Result, folder: Path) -> Result:
    """Return the figures of a contestant's process."""
    path, output = folder / "request.json", folder / "sampled.json"
    write_json(path, request | {"name": name, "output": str(output)})
    own = {"OMP_NUM_THREADS": str(request["threads"])}
    process = subprocess.run(
        [sys.executable, __file__, "--sample", str(path)], env=os.environ | QUIET | own, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if process.returncode:
        raise SystemExit("\n".join([f"{name}:", *process.stderr.splitlines()[-15:]]))
    return dict(read_json(output, "sampling.py"))


def sample(path: Path) -> None:
    """Run a contestant: load, sample two prompts, then time all."""
    request = read_json(path, "sampling.py")
    data, model = Path(request["data"]), EvaluatedModel(Path(request["model"]))
    cpu_matmul.choose()
    prompts = sorted(read_prompts(data), key=lambda prompt: -len(prompt.tokens))
    name = request["name"]
    with contextlib.ExitStack() as stack:
        draw = (ours if name == OURS else of_trl)(request, data, model, stack)
        draw(prompts[-2:])
        started, before = time.monotonic(), time.process_time()
        tokens = draw(prompts)
        seconds, cpu = time.monotonic() - started, time.process_time() - before
    answers = len(prompts) * request["n"]
    figures = (seconds, cpu, answers / cpu, tokens / cpu, tokens)
    write_json(Path(request["output"]), dict(zip(FIGURES, figures, strict=True)))


def ours(request: Result, data: Path, model: EvaluatedModel, _: Any) -> Callable[[list[AskedPrompt]], int]:
    """Sample as `zerolora stage sample` does."""
    loaded, tokenizer = load(model.base, model.torch_device, [])
    stops = stops_of(model, loaded, tokenizer, data)
    settings = SampleSettings.model_validate(
        {"of": {"base": True}, "dataset": "rows", "n": request["n"], "max_new_tokens": request["limit"]}
    )

    def draw(prompts: list[AskedPrompt]) -> int:
        room, batches = PromptBatches(loaded, settings), batches_of(prompts, settings.n, settings.batch)
        return draw_answers((loaded, tokenizer, stops), settings, prompts, batches, room, lambda lines: None)

    return draw


def no_reward(**given: Any) -> list[float | None]:
    """Return a reward for each answer, which nothing reads."""
    return [0.0] * len(given["prompts"])


def of_trl(
    request: Result, data: Path, model: EvaluatedModel, stack: contextlib.ExitStack
) -> Callable[[list[AskedPrompt]], int]:
    """Sample as TRL's GRPOTrainer does before each of its steps."""
    from datasets import Dataset
    from transformers import ContinuousBatchingConfig
    from trl import GRPOConfig, GRPOTrainer

    loaded, tokenizer = load(model.base, model.torch_device, [])
    stops = stops_of(model, loaded, tokenizer, data)
    continuous, n = request["name"] == CONTINUOUS, request["n"]
    config = GRPOConfig(
        output_dir=stack.enter_context(tempfile.TemporaryDirectory()), use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=n, num_generations=n, max_completion_length=request["limit"], temperature=1.0,
        top_p=1.0, top_k=0, gradient_checkpointing=False, use_transformers_continuous_batching=continuous,
        generation_kwargs={"eos_token_id": sorted(stops)},
    )  # fmt: skip
    trainer = GRPOTrainer(
        loaded, reward_funcs=no_reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "0"}] * n),
    )  # fmt: skip
    loaded.eval()
    generated: Callable[..., Any] = trainer._generate_single_turn

    def draw(prompts: list[AskedPrompt]) -> int:
        asked = [prompt.tokens for prompt in prompts for _ in range(n)]
        size = len(asked)
        if continuous:
            # Room for all answers: by default the cache takes most of the free memory, cleared at each call.
            trainer.continuous_batching_config = ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=sum(-(-(len(prompt) + request["limit"]) // PAGE) for prompt in asked) + 1,
                max_batch_tokens=max(PAGE, sum(map(len, asked))),
            )
        else:
            size = int(request["name"].rpartition(" ")[2])
        tokens = 0
        for start in range(0, len(asked), size):
            answers, _ = generated(asked[start : start + size], None, {}, n)
            tokens += sum(map(len, answers))
        return tokens

    return draw


def section(result: Result) -> str:
    """Return the section of docs/sampling.md; the slowest contestant is first."""
    figures = result["contestants"]
    best = max((name for name in figures if name.startswith(TRL)), key=lambda name: figures[name][FIGURES[2]])
    kept = {name: figures[name] for name in (best, CONTINUOUS, OURS)}
    rate = figures[best]["answers_per_cpu_second"]
    rows = [
        (
            f"{name} at a time" if name == best else name,
            f"{each['answers_per_cpu_second']:.2f}",
            f"{each['answers_per_cpu_second'] / rate:.2f}",
            f"{each['tokens_per_cpu_second']:.0f}",
        )
        for name, each in sorted(kept.items(), key=lambda item: item[1]["answers_per_cpu_second"])
    ]
    length = result["prompt_tokens"]
    return (
        f"{result['n']} answers of up to {result['max_new_tokens']} tokens to each of {result['prompts']} prompts of "
        f"{length['mean']:.0f} tokens on average and {length['longest']} at most,\nby {result['model']} in fp32 with "
        f"{counted(result['threads'], 'thread')}, in {counted(len(figures[OURS]['rounds']), 'round')} "
        "(`benchmarks/evaluate/sampling.py`, `benchmarks/results/sampling.json`):\n\n"
        + table(("", "answers a CPU second", "over TRL's generate", "tokens a CPU second"), rows, right=3)
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        torch.manual_seed(0)
        sample(Path(sys.argv[2]))
    else:
        main()
