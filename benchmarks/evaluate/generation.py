"""Measure how fast rows are answered, by this project and by others, on a free machine and beside other work.

    .venv/bin/python benchmarks/evaluate/generation.py --vllm-python ~/vllm/bin/python
    .venv/bin/python benchmarks/evaluate/generation.py --table

Needs the base model: run `make run` first. The rows are the reference task's held-out ones. All answer them greedily,
in fp32 on a CPU, with as many threads as there are cores unless --threads says otherwise, each in a process of its own
that loads, answers two rows, and is timed from there:

- one by one: transformers' generate with one prompt at a time, as in the reference experiment;
- continuous batching: transformers' generate_batch;
- vLLM, if --vllm-python names an interpreter that has it (docs/evaluation.md): its engine with the arguments that
  `evaluate.engine: vllm` gives it;
- zerolora: as `zerolora evaluate` does, with evaluate.batch auto.

They take turns in --rounds rounds, which --add puts to those of an earlier call. Beside other work, which is one
process that computes for each core, zerolora answers the same rows once as it does, and once with threads that spin
while they wait, as OpenMP's do unless told otherwise. Texts are compared with those of one by one. Writes
benchmarks/results/evaluate.json and puts its tables into docs/evaluation.md; --table prints them.
"""

import argparse
import os
import statistics
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
from against_reference import VALIDATED, reference_task
from contest import MODEL, QUIET, RESULTS, about
from in_docs import put
from transformers import ContinuousBatchingConfig, GenerationConfig

from zerolora.commands.stage_commands import WAITING
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
Answers = tuple[list[str], int]
"""Texts, and the number of tokens generated."""
Found = dict[str, Any]


def main() -> None:
    """Have all answer, write."""
    options = _options()
    if options.table:
        print("\n\n".join("\n".join(table) for table in tables(read_json(options.output, "generation.py"))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = reference_task(folder, options.model.resolve(), options, VALIDATED)
        request = {
            "model": str(options.model.resolve()), "data": str(task.data), "rows": options.rows,
            "limit": options.max_new_tokens, "threads": options.threads, "vllm_python": options.vllm_python,
        }  # fmt: skip
        names = list(ANSWERERS)
        version = {}
        if options.vllm_python:
            names.insert(names.index("zerolora"), VLLM)
            version = {"vllm": vllm_engine.check(vllm_settings(request), task.data, EvaluatedModel(options.model))}
        result = about(options.device) | {
            "model": options.model.name, "rows": options.rows, "max_new_tokens": options.max_new_tokens,
            "threads": options.threads, "busy": options.busy,
        } | version  # fmt: skip
        found = take_turns(names, request, folder, options.rounds)
        with busy(options.busy):
            loaded = take_turns(["zerolora", SPINNING], request, folder, options.rounds)
    reference = found[REFERENCE][0]["texts"]
    result |= {"free": summary(found, reference), "loaded": summary(loaded, reference)}
    if options.add:
        result = together(read_json(options.output, "generation.py"), result)
    write_json(options.output, result)
    if options.output == RESULT:
        put("evaluation.md", "speed", section(result))


def take_turns(names: list[str], request: Found, folder: Path, rounds: int) -> dict[str, list[Found]]:
    """Return what each contestant found in each round; every other round is in the opposite order."""
    found: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            found[name].append(answered(name, request, folder))
            print(f"{name}: {found[name][-1]['rows_per_second']:.2f} rows/s", flush=True)
    return found


def answered(name: str, request: Found, folder: Path) -> Found:
    """Have a process of its own answer, and return its figures and texts."""
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


def device_here() -> Device:
    """Return the device that contestants use."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def answer(request: Path) -> None:
    """Be a contestant: load, answer two rows, then all against the clock."""
    asked = read_json(request, "generation.py")
    if asked["name"] == VLLM:
        write_json(Path(asked["output"]), in_vllm(asked, request.parent))
        return
    device = device_here()
    if asked["name"] == "zerolora" and device == "cpu":
        cpu_matmul.choose()
    data, model = Path(asked["data"]), EvaluatedModel(Path(asked["model"]), device=device)
    loaded, tokenizer = load(model.base, model.torch_device, [])
    stops = stops_of(model, loaded, tokenizer, data)
    rows = list(open_split(data, "test"))[: asked["rows"]]
    answerer = ANSWERERS[asked["name"]]
    answerer(loaded, tokenizer, rows[:2], stops, asked["limit"])
    started, before = time.monotonic(), time.process_time()
    texts, tokens = answerer(loaded, tokenizer, rows, stops, asked["limit"])
    seconds = time.monotonic() - started
    figures = {
        "seconds": seconds, "cpu_seconds": time.process_time() - before, "rows_per_second": len(rows) / seconds,
        "tokens_per_second": tokens / seconds, "tokens": tokens, "texts": texts,
    }  # fmt: skip
    write_json(Path(asked["output"]), figures)


def vllm_settings(asked: Found) -> EvaluateSettings:
    """Return the settings by which `zerolora evaluate` has vLLM answer."""
    return EvaluateSettings(
        check="sum", max_new_tokens=asked["limit"], engine="vllm", vllm_python=asked["vllm_python"]
    )  # fmt: skip


def in_vllm(asked: Found, folder: Path) -> Found:
    """Have vLLM answer in an interpreter of its own, which measures itself, and decode what it says."""
    device = device_here()
    data, model = Path(asked["data"]), EvaluatedModel(Path(asked["model"]), device=device)
    figures = folder / "figures.json"
    rows = list(open_split(data, "test"))[: asked["rows"]]
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    config = config_of(model.base)
    length = max(map(len, prompts)) + asked["limit"]
    arguments = vllm_engine.engine_arguments(vllm_settings(asked), model, model.base, config, length)
    request = {
        "engine": arguments, "limit": asked["limit"], "prompts": prompts, "figures": str(figures),
        "stops": sorted(vllm_engine.stops_for(model, model.base, data)),
    }  # fmt: skip
    write_json(folder / "in_vllm.json", request)
    command = [asked["vllm_python"], "-I", str(IN_VLLM), str(folder / "in_vllm.json")]
    told = subprocess.run(command, env=vllm_engine.environment(), capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stdout[-3000:] + told.stderr[-3000:])
    found = read_json(figures, "in_vllm.py")
    tokenizer, _ = load_tokenizer(model.base, [], None)
    texts, tokens = _decoded(tokenizer, found["answers"])
    seconds = found["seconds"]
    return {
        "seconds": seconds, "cpu_seconds": found["cpu_seconds"], "rows_per_second": len(rows) / seconds,
        "tokens_per_second": tokens / seconds, "tokens": tokens, "texts": texts,
    }  # fmt: skip


def ours(model: Any, tokenizer: Any, rows: list[Found], stops: set[int], limit: int) -> Answers:
    """Answer as `zerolora evaluate` does."""
    return generate(model, tokenizer, rows, stops, EvaluateSettings(check="sum", max_new_tokens=limit))


def one_by_one(model: Any, tokenizer: Any, rows: list[Found], stops: set[int], limit: int) -> Answers:
    """Answer one prompt after the other with transformers' generate."""
    found = []
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["prompt"]]], device=model.device)
        with torch.no_grad():
            whole = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False,
                temperature=None, top_p=None, top_k=None, eos_token_id=sorted(stops),
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        found.append(whole[0, row["prompt"] :].tolist())
    return _decoded(tokenizer, found)


def continuous(model: Any, tokenizer: Any, rows: list[Found], stops: set[int], limit: int) -> Answers:
    """Answer with transformers' continuous batching.

    Its cache holds all rows, and no more: left open, it takes and clears most of the free memory at each call.
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
    # Named by the order in which they were asked: req_0, req_1 …
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
    """Have so many processes compute meanwhile."""
    computing = [sys.executable, "-c", "while True: sum(range(100_000))"]
    others = [subprocess.Popen(computing) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def summary(found: dict[str, list[Found]], reference: list[str]) -> Found:
    """Return each contestant's medians and rounds, and whether its texts are the reference's in all of them."""
    return {
        name: {
            **_medians(rounds),
            "tokens": rounds[0]["tokens"],
            "same_texts": all(each["texts"] == reference for each in rounds),
            "rounds": [{figure: each[figure] for figure in FIGURES} for each in rounds],
        }
        for name, rounds in found.items()
    }


def together(before: Found, after: Found) -> Found:
    """Return the rounds of two results as one, which is dated and described as the later."""
    asked = ("model", "rows", "max_new_tokens", "threads", "busy")
    if [before[name] for name in asked] != [after[name] for name in asked]:
        raise SystemExit("the result that rounds are added to has other rows, threads or limits")
    for part in ("free", "loaded"):
        for name, each in after[part].items():
            rounds = before[part][name]["rounds"] + each["rounds"]
            same = before[part][name]["same_texts"] and each["same_texts"]
            after[part][name] = each | _medians(rounds) | {"same_texts": same, "rounds": rounds}
    return after


def _medians(rounds: list[Found]) -> Found:
    return {figure: statistics.median(each[figure] for each in rounds) for figure in FIGURES}


def tables(result: Found) -> list[list[str]]:
    """Return the lines of the tables of docs/evaluation.md, the slowest first."""
    free, loaded = result["free"], result["loaded"]
    least = free[REFERENCE]["rows_per_second"]
    first = ["| | rows/s | over one by one | tokens/s | CPU seconds | same texts |", "|---|---|---|---|---|---|"]
    first += [
        f"| {name} | {each['rows_per_second']:.2f} | {each['rows_per_second'] / least:.1f} | "
        f"{each['tokens_per_second']:.0f} | {each['cpu_seconds']:.0f} | {'yes' if each['same_texts'] else 'no'} |"
        for name, each in sorted(free.items(), key=lambda item: item[1]["rows_per_second"])
    ]
    second = ["| beside other work | tokens/s | over a free machine | CPU seconds |", "|---|---|---|---|"]
    alone = free["zerolora"]["tokens_per_second"]
    second += [
        f"| {name} | {each['tokens_per_second']:.0f} | {each['tokens_per_second'] / alone:.2f} | "
        f"{each['cpu_seconds']:.0f} |"
        for name, each in sorted(loaded.items())
    ]
    return [first, second]


def section(result: Found) -> str:
    """Return what docs/evaluation.md says of a result."""
    engine = f"; vLLM is {result['vllm']}" if "vllm" in result else ""
    said = (
        f"{result['rows']} rows of the reference task, answered by {result['model']} in fp32 with {result['threads']} "
        f"threads, up to {result['max_new_tokens']} tokens\n"
        f"each (`benchmarks/evaluate/generation.py`, `benchmarks/results/evaluate.json`{engine}):"
    )
    return "\n\n".join(["## Speed", said, *("\n".join(table) for table in tables(result))])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--model", type=Path, default=MODEL, help="a directory with weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each contestant")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="processes of the other work")
    parser.add_argument("--vllm-python", help="a Python interpreter that has vLLM")
    parser.add_argument("--add", action="store_true", help="add the rounds to those of the result")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the tables of a result")
    return parser.parse_args()


if __name__ == "__main__":
    answer(Path(sys.argv[2])) if sys.argv[1:2] == ["--answer"] else main()
