"""Measure how fast rows are answered, by zerolora and by others, on a free machine and beside other work.

    .venv/bin/python benchmarks/evaluate/generation.py --vllm-python ~/vllm/bin/python

Needs the base model: run `make run` first. The rows are held-out ones of the reference task. Each contestant answers
them greedily, in fp32 on a CPU, with as many threads as cores (--threads), in its own process, which loads, answers two
rows, and is timed from there:

- one by one: transformers' generate with one prompt at a time, as in the reference experiment;
- continuous batching: transformers' generate_batch;
- vLLM, if --vllm-python names an interpreter that has it (docs/evaluation.md): its engine with the arguments of
  `evaluate.engine: vllm`;
- zerolora: `zerolora stage evaluate` with evaluate.batch auto.

They take turns in --rounds rounds. Beside other work, one computing process for each core, zerolora answers the same
rows with threads that sleep while they wait, its own setting, and with threads that spin, OpenMP's default. Texts are
compared with those of one by one. Writes benchmarks/results/evaluate.json and puts its tables into docs/evaluation.md.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import torch
from contest import MODEL, QUIET, about, reference_task
from measuring import RESULTS, medians, parser_of, put, table, turns
from transformers import ContinuousBatchingConfig, GenerationConfig

from zerolora.commands.stage_functions import WAITING
from zerolora.config.settings import EvaluateSettings
from zerolora.data.prepared_rows import open_split
from zerolora.evaluate import vllm_engine
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, load_tokenizer, stops_of
from zerolora.evaluate.generation import generate
from zerolora.files import read_json, write_json
from zerolora.machine import cpu_matmul
from zerolora.model.architecture import config_of
from zerolora.types import Device

RESULT = RESULTS / "evaluate.json"
REFERENCE = "one by one"
VLLM = "vLLM"
IN_VLLM = Path(__file__).resolve().with_name("in_vllm.py")
SPINNING = "zerolora, threads that spin"
FIGURES = ("seconds", "cpu_seconds", "rows_per_second", "tokens_per_second")
HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"
Answers = tuple[list[str], int]
"""Texts, and the number of generated tokens."""
Result = dict[str, Any]


def main() -> None:
    """Time all contestants, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a directory with weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each contestant")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="processes of the other work")
    parser.add_argument("--vllm-python", help="a Python interpreter that has vLLM")
    parser.set_defaults(device=HERE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = reference_task(folder, options.model.resolve(), options)
        request = {
            "model": str(options.model.resolve()), "data": str(task.data), "rows": options.rows,
            "limit": options.max_new_tokens, "threads": options.threads, "vllm_python": options.vllm_python,
        }  # fmt: skip
        names = list(ANSWERERS)
        result = about(HERE) | {
            "model": options.model.name, "rows": options.rows, "max_new_tokens": options.max_new_tokens,
            "threads": options.threads, "busy": options.busy,
        }  # fmt: skip
        if options.vllm_python:
            names.insert(names.index("zerolora"), VLLM)
            result["vllm"] = vllm_engine.check(vllm_settings(request), task.data, EvaluatedModel(options.model))
        free = all_rounds(names, request, folder, options.rounds)
        with busy(options.busy):
            loaded = all_rounds(["zerolora", SPINNING], request, folder, options.rounds)
    texts = free[REFERENCE][0]["texts"]
    result |= {"free": summary(free, texts), "loaded": summary(loaded, texts)}
    write_json(RESULT, result)
    put("evaluation.md", "speed", section(result))


def all_rounds(names: list[str], request: Result, folder: Path, rounds: int) -> dict[str, list[Result]]:
    """Return the figures and texts of each contestant in each round."""
    result: dict[str, list[Result]] = {name: [] for name in names}
    for name in turns(names, rounds):
        result[name].append(answered(name, request, folder))
        print(f"{name}: {result[name][-1]['rows_per_second']:.2f} rows/s", flush=True)
    return result


def answered(name: str, request: Result, folder: Path) -> Result:
    """Return the figures and texts of a contestant's process."""
    path, output = folder / "request.json", folder / "answers.json"
    write_json(path, request | {"name": name.split(",", maxsplit=1)[0], "output": str(output)})
    own = {"OMP_NUM_THREADS": str(request["threads"])} | (WAITING if name == "zerolora" else {})
    others = {key: value for key, value in os.environ.items() if key not in WAITING}
    process = subprocess.run(
        [sys.executable, __file__, "--answer", str(path)], env=others | QUIET | own, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if process.returncode:
        raise SystemExit("\n".join([f"{name}:", *process.stderr.splitlines()[-15:]]))
    return dict(read_json(output, "generation.py"))


def answer(path: Path) -> None:
    """Run a contestant: load, answer two rows, then time all."""
    request = read_json(path, "generation.py")
    data, model = Path(request["data"]), EvaluatedModel(Path(request["model"]), device=HERE)
    rows = list(open_split(data, "test"))[: request["rows"]]
    if request["name"] == VLLM:
        figures, (texts, tokens) = in_vllm(request, path.parent, model, rows)
    else:
        if request["name"] == "zerolora" and HERE == "cpu":
            cpu_matmul.choose()
        loaded, tokenizer = load(model.base, model.torch_device, [])
        stops = stops_of(model, loaded, tokenizer, data)
        answerer = ANSWERERS[request["name"]]
        answerer(loaded, tokenizer, rows[:2], stops, request["limit"])
        started, before = time.monotonic(), time.process_time()
        texts, tokens = answerer(loaded, tokenizer, rows, stops, request["limit"])
        figures = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - before}
    rates = {"rows_per_second": len(rows) / figures["seconds"], "tokens_per_second": tokens / figures["seconds"]}
    write_json(Path(request["output"]), figures | rates | {"tokens": tokens, "texts": texts})


def vllm_settings(request: Result) -> EvaluateSettings:
    """Return the settings of `zerolora stage evaluate` with vLLM."""
    python, limit = request["vllm_python"], request["limit"]
    return EvaluateSettings(check="sum", max_new_tokens=limit, engine="vllm", vllm_python=python)


def in_vllm(request: Result, folder: Path, model: EvaluatedModel, rows: list[Result]) -> tuple[Result, Answers]:
    """Return vLLM's seconds and CPU seconds, measured by its process, and its answers."""
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    length = max(map(len, prompts)) + request["limit"]
    settings, config = vllm_settings(request), config_of(model.base)
    write_json(
        folder / "in_vllm.json",
        {
            "engine": vllm_engine.engine_arguments(settings, model, model.base, config, length),
            "limit": request["limit"], "prompts": prompts, "figures": str(folder / "figures.json"),
            "stops": sorted(vllm_engine.stops_for(model, model.base, Path(request["data"]))),
        },
    )  # fmt: skip
    command = [request["vllm_python"], "-I", str(IN_VLLM), str(folder / "in_vllm.json")]
    process = subprocess.run(command, env=vllm_engine.environment(), capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stdout[-3000:] + process.stderr[-3000:])
    figures = dict(read_json(folder / "figures.json", "in_vllm.py"))
    tokenizer, _ = load_tokenizer(model.base, [], None)
    return figures, _decoded(tokenizer, figures.pop("answers"))


def ours(model: Any, tokenizer: Any, rows: list[Result], stops: set[int], limit: int) -> Answers:
    """Answer as `zerolora stage evaluate` does."""
    return generate(model, tokenizer, rows, stops, EvaluateSettings(check="sum", max_new_tokens=limit))


def one_by_one(model: Any, tokenizer: Any, rows: list[Result], stops: set[int], limit: int) -> Answers:
    """Answer one prompt at a time with transformers' generate."""
    result = []
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["prompt"]]], device=model.device)
        with torch.no_grad():
            whole = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False,
                temperature=None, top_p=None, top_k=None, eos_token_id=sorted(stops),
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        result.append(whole[0, row["prompt"] :].tolist())
    return _decoded(tokenizer, result)


def continuous(model: Any, tokenizer: Any, rows: list[Result], stops: set[int], limit: int) -> Answers:
    """Answer with transformers' continuous batching.

    Its cache has exactly room for all rows: by default it allocates and clears most of the free memory at each call.
    """
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=sorted(stops), pad_token_id=tokenizer.pad_token_id
    )
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    page = 256
    sizes = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=sum(-(-(len(prompt) + limit) // page) for prompt in prompts) + 1,
        max_batch_tokens=max(256, sum(map(len, prompts))),
    )
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=sizes)
    # Their names number the prompts: req_0, req_1 …
    named = sorted(outputs.items(), key=lambda item: int(item[0].rpartition("_")[2]))
    return _decoded(tokenizer, [each.generated_tokens for _, each in named])


ANSWERERS: dict[str, Callable[..., Answers]] = {
    REFERENCE: one_by_one,
    "continuous batching": continuous,
    "zerolora": ours,
}


def _decoded(tokenizer: Any, answers: list[list[int]]) -> Answers:
    return [tokenizer.decode(each, skip_special_tokens=True) for each in answers], sum(map(len, answers))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many computing processes meanwhile."""
    computing = [sys.executable, "-c", "while True: sum(range(100_000))"]
    others = [subprocess.Popen(computing) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def summary(result: dict[str, list[Result]], texts: list[str]) -> Result:
    """Return each contestant's medians and rounds, and whether its texts equal `texts` in all rounds."""
    return {
        name: {
            **medians(figures := [{figure: each[figure] for figure in FIGURES} for each in rounds]),
            "tokens": rounds[0]["tokens"],
            "same_texts": all(each["texts"] == texts for each in rounds),
            "rounds": figures,
        }
        for name, rounds in result.items()
    }


def section(result: Result) -> str:
    """Return the section of docs/evaluation.md; the slowest contestant is first."""
    free, loaded = result["free"], result["loaded"]
    least, alone = free[REFERENCE]["rows_per_second"], free["zerolora"]["tokens_per_second"]
    engine = f"; vLLM is {result['vllm']}" if "vllm" in result else ""
    text = (
        f"{result['rows']} rows of the reference task, answered by {result['model']} in fp32 with {result['threads']} "
        f"threads, up to {result['max_new_tokens']} tokens\n"
        f"each (`benchmarks/evaluate/generation.py`, `benchmarks/results/evaluate.json`{engine}):"
    )
    first = [
        (
            name,
            f"{each['rows_per_second']:.2f}",
            f"{each['rows_per_second'] / least:.1f}",
            f"{each['tokens_per_second']:.0f}",
            f"{each['cpu_seconds']:.0f}",
            "yes" if each["same_texts"] else "no",
        )
        for name, each in sorted(free.items(), key=lambda item: item[1]["rows_per_second"])
    ]
    second = [
        (name, f"{rate:.0f}", f"{rate / alone:.2f}", f"{loaded[name]['cpu_seconds']:.0f}")
        for name, rate in ((name, each["tokens_per_second"]) for name, each in sorted(loaded.items()))
    ]
    tables = [
        table(["", "rows/s", "over one by one", "tokens/s", "CPU seconds", "same texts"], first),
        table(["beside other work", "tokens/s", "over a free machine", "CPU seconds"], second),
    ]
    return "\n\n".join(["## Speed", text, *tables])


if __name__ == "__main__":
    answer(Path(sys.argv[2])) if sys.argv[1:2] == ["--answer"] else main()
