"""Measure prepare's throughput against `datasets.map` and against the tokenizer alone, on the same rows, in turn.

    .venv/bin/python benchmarks/tokenizing.py [rows]

Needs a tokenizer: run `make run` first. Rows are cut from the text files of installed Python
packages, with the lognormal lengths of instruction data. Each is timed three times, on all rows and on a quarter of
them; the best counts. Throughput is that of the other three quarters, which excludes one-time work (imports, starting
processes, writing the page); its seconds are reported separately. Writes benchmarks/results/tokenizing.json.
"""

import json
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine

from zerolora.config.settings import PrepareSettings
from zerolora.data.prepare import prepare
from zerolora.files import write_json

MODEL = Path("resources/models/smollm2-135m-instruct")
ROUNDS = 3


def main() -> None:
    """Time all three, write their rows and tokens a second and the ratios."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 80_000
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = texts(count)
        files = {}
        for size in (count // 4, count):
            files[size] = folder / f"rows{size}.jsonl"
            files[size].write_text("".join(json.dumps(row) + "\n" for row in rows[:size]), encoding="utf-8")
        runners: dict[str, Callable[[Path], tuple[int, float]]] = {
            "tokenizer alone": tokenizer_alone,
            "datasets.map": lambda file: datasets_map(file, folder / "map", cores),
            "zerolora prepare": lambda file: ours(file, folder / "ours", cores),
        }
        best: dict[tuple[str, int], float] = {}
        tokens: dict[tuple[str, int], int] = {}
        for _ in range(ROUNDS):
            for size, file in files.items():
                for runner, run in runners.items():
                    key = runner, size
                    tokens[key], seconds = run(file)
                    best[key] = min(best.get(key, seconds), seconds)
                    print(f"{runner}, {size} rows: {seconds:.1f} s", flush=True)
    assert tokens["zerolora prepare", count] == tokens["datasets.map", count], tokens
    speed = {}
    for runner in runners:
        whole, quarter = ((tokens[runner, size], best[runner, size]) for size in (count, count // 4))
        speed[runner] = throughput(count, whole, quarter)
    ratio = {
        runner: round(speed["zerolora prepare"]["rows_per_second"] / speed[runner]["rows_per_second"], 3)
        for runner in ("datasets.map", "tokenizer alone")
    }
    result = {
        "machine": machine(),
        "rows": count,
        "mean_tokens": round(tokens["zerolora prepare", count] / count, 1),
        "cores": cores,
        "best_of": ROUNDS,
        "speed": speed,
        "ratio_to": ratio,
    }
    write_json(RESULTS / "tokenizing.json", result)
    print(json.dumps(result, indent=2))


def throughput(rows: int, whole: tuple[int, float], quarter: tuple[int, float]) -> dict[str, float]:
    """Return seconds and rates, from tokens and seconds of all rows and of a quarter of them."""
    seconds = whole[1] - quarter[1]
    rows_per_second = (rows - rows // 4) / seconds
    return {
        "seconds": round(whole[1], 2),
        "seconds_done_once": round(whole[1] - rows / rows_per_second, 2),
        "rows_per_second": round(rows_per_second),
        "tokens_per_second": round((whole[0] - quarter[0]) / seconds),
    }


def texts(count: int) -> list[dict[str, str]]:
    """Return `count` rows of instruction and answer, cut from the text files of installed packages."""
    from transformers import AutoTokenizer

    added = AutoTokenizer.from_pretrained(MODEL).added_tokens_decoder.values()
    packages = Path(sysconfig.get_paths()["purelib"])
    files = sorted(path for pattern in ("*.md", "*.rst", "*.txt", "*.py") for path in packages.glob(f"*/**/{pattern}"))
    draw = random.Random(0)  # noqa: S311 - data, not secrets
    draw.shuffle(files)
    result: list[dict[str, str]] = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        start = 0
        while start < len(text) - 200 and not any(token.content in text for token in added):
            question, answer = (int(draw.lognormvariate(mean, 0.7)) for mean in (4.4, 5.6))
            part = text[start : start + question + answer]
            start += question + answer
            if part[:question].strip() and part[question:].strip():
                result.append({"instruction": part[:question], "output": part[question:]})
            if len(result) == count:
                return result
    raise SystemExit(f"the installed packages have text for {len(result)} rows, not {count}")


def tokenizer_alone(rows: Path) -> tuple[int, float]:
    """Return tokens and seconds of the tokenizer's batch call, from rendered texts to ids, on all its threads."""
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    written = [
        tokenizer.apply_chat_template(messages(row), tokenize=False)
        for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines())
    ]
    started = time.perf_counter()
    tokens = 0
    for start in range(0, len(written), 1000):
        result = tokenizer.backend_tokenizer.encode_batch_fast(written[start : start + 1000], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in result)
    return tokens, time.perf_counter() - started


def datasets_map(rows: Path, output: Path, cores: int) -> tuple[int, float]:
    """Return tokens and seconds of loading, rendering, tokenizing and masking in `datasets.map`, as trainers do."""
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoTokenizer

    disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    shutil.rmtree(output, ignore_errors=True)

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        pairs = [
            messages({"instruction": question, "output": answer})
            for question, answer in zip(batch["instruction"], batch["output"], strict=True)
        ]
        prompts = [
            tokenizer.apply_chat_template(pair[:1], tokenize=False, add_generation_prompt=True) for pair in pairs
        ]
        wholes = [tokenizer.apply_chat_template(pair, tokenize=False) for pair in pairs]
        answers = [str(whole[len(prompt) :]).removesuffix("\n") for prompt, whole in zip(prompts, wholes, strict=True)]
        prompt_ids, answer_ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompts, answers))
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True):
            columns["input_ids"].append(prompt + answer)
            columns["labels"].append([-100] * len(prompt) + answer)
        return columns

    started = time.perf_counter()
    data = load_dataset("json", data_files=str(rows), cache_dir=str(output / "cache"), split="train")
    data = data.map(encode, batched=True, num_proc=cores, remove_columns=data.column_names)
    seconds = time.perf_counter() - started
    batches = (data[start : start + 1000]["input_ids"] for start in range(0, len(data), 1000))
    return sum(len(row) for batch in batches for row in batch), seconds


def ours(rows: Path, output: Path, cores: int) -> tuple[int, float]:
    """Return tokens and seconds of the whole stage, with verified mask, splits, statistics and page."""
    split = {"validation": 100, "test": 100}
    settings = PrepareSettings.model_validate(
        {"model": "smollm2", "path": str(rows), "split": split, "max_length": 100_000}
    )
    started = time.perf_counter()
    prepare(settings, MODEL / "manifest.json", output, cores)
    seconds = time.perf_counter() - started
    stats = json.loads((output / "stats.json").read_text())
    return sum(stats[f"{name}_tokens"] for name in ("train", "validation", "test")), seconds


def messages(row: dict[str, str]) -> list[dict[str, str]]:
    """Return a row as a conversation."""
    return [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]


if __name__ == "__main__":
    main()
