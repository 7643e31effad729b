"""Measure the merge of an adapter against peft's merge_and_unload, LLaMA-Factory's export and a plain copy.

    .venv/bin/python benchmarks/merge/compare.py [--llamafactory VENV/bin/llamafactory-cli]

A model of random bf16 weights of each size is written, with a LoRA adapter of all its linear modules, and merged in
rounds, whose order rotates: by `zerolora merge`, which writes no hashes by hand, and as a stage, which does; by peft,
from_pretrained to save_pretrained; by `cp`, in the kernel or with --reflink=never through its own buffer. Each is a
process of its own, which ends with its files flushed to disk. "start" merges a model of kilobytes: the rest of the time
is for the bytes. "rounded only" is zerolora's merge without the product, which turns the numbers to fp32 and back;
"bytes only" turns none, and so reads and writes like a copy, but in a process of Python that has torch. Taken of each:
wall and CPU seconds, peak resident set (VmHWM, as the kernel keeps it) and peak of memory in which a shared page
counts once (Pss, every 50 ms); medians of the rounds, and the least wall seconds, which other work on the machine
disturbs least. The page cache is dropped of the base and the adapter (posix_fadvise) before each, then warmed by
reading them, so that all read from memory and what is compared is work and writing; --cold leaves it dropped. Then
--settle seconds pass: a virtual machine may hand the memory of the files that were just removed back to its host, and
getting it again costs as much as a copy, which all are to pay or none. --add keeps the models that the output has
already, if they were measured on this machine with these versions and options.
Needs disk for three copies of the largest model. Writes benchmarks/results/merge.json.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import machine

from zerolora.files import write_json

ROOT = Path(__file__).resolve().parents[2]
# Llama's shapes (config.json of TinyLlama-1.1B, Llama-3.2-3B and Llama-2-7B), heads and embeddings apart.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 320},
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
           "num_key_value_heads": 4, "vocab_size": 32000},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
}  # fmt: skip
SHARD = 5_000_000_000
"""Bytes of a weight file, at most."""
DRAWN = 4_000_003
"""Random numbers, which are repeated: what merging costs does not depend on them."""
EVERY = 0.05
"""Seconds between two measurements of Pss."""
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
"""
PARTS = """
import sys
from pathlib import Path
from zerolora.merge import stream
from zerolora.merge.user_merge import merge_by_hand
from zerolora.methods import lora
left_out, base, adapter, output = sys.argv[1:]
if left_out == "product":
    lora.Product.apply = lambda self, rows, first: None
else:
    stream.apply = lambda update, rows, first: None
merge_by_hand(Path(base), [Path(adapter)], [], Path(output))
"""
ROW = "| {size} | {way} | {seconds:.1f} s | {least:.1f} s | {rate:.0f} MB/s | {rss:.2f} GB | {pss:.2f} GB |"


def main() -> None:
    """Merge in every way, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/merge.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "3B", "7B"])
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are taken")
    parser.add_argument("--settle", type=float, default=5, help="seconds before each")
    parser.add_argument("--folder", type=Path, help="where models are written; a temporary one if left out")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    parser.add_argument("--add", action="store_true", help="keep the models that the output has")
    parser.add_argument("--llamafactory", type=Path, help="llamafactory-cli of a virtual environment")
    options = parser.parse_args()
    found: dict[str, Any] = machine(("torch", "transformers", "peft", "safetensors")) | {
        "page_cache": "cold" if options.cold else "warm",
        "rank": options.rank,
        "settle_seconds": options.settle,
        "file_system": file_system(options.folder or Path(tempfile.gettempdir())),
        "threads": len(os.sched_getaffinity(0)),
        "llamafactory": versions(options.llamafactory) if options.llamafactory else "unmeasured: not given",
        "models": {},
    }
    if options.add and options.output.exists():
        found["models"] = models_of(options.output, found)
    for size in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            write_model(folder, MODELS[size], options.rank)
            (folder / "small").mkdir()
            write_model(folder / "small", MODELS["tiny"], options.rank)
            found["models"][size] = compared(folder, options)
            write_json(options.output, found)
    print(markdown(found))


def models_of(output: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the models of an earlier result. Exits if it was not measured as `found` is."""
    before: dict[str, Any] = json.loads(output.read_text())
    for key in sorted((before.keys() | found.keys()) - {"models"}):
        if before.get(key) != found.get(key):
            raise SystemExit(f"{output}: {key} is {before.get(key)}, and {found.get(key)} here; leave out --add")
    models: dict[str, Any] = before["models"]
    return models


def compared(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each way, in turn."""
    base, adapter = folder / "base", folder / "adapter"
    ways = commands(folder, options.llamafactory)
    of_rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    kept: dict[str, Path] = {}
    alike = None
    for number in range(options.rounds):
        order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for way in order:
            inputs = [*base.iterdir(), *adapter.iterdir()]
            forget(inputs)
            if not options.cold:
                for path in inputs:
                    subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
            for output in (folder / "output", folder / "work"):
                shutil.rmtree(output, ignore_errors=True)
            os.sync()
            time.sleep(options.settle)
            of_rounds[way].append(taken(ways[way], folder))
            print(f"{way}: {of_rounds[way][-1]}", flush=True)
            if number == options.rounds - 1 and way in ("zerolora", "peft"):
                kept[way] = (folder / "output").rename(folder / f"by {way}")
            if alike is None and len(kept) == 2:
                alike = same(*kept.values())
                for output in kept.values():
                    shutil.rmtree(output)
    bytes_ = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    found: dict[str, Any] = {
        way: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        | {"least_seconds": min(each["seconds"] for each in rounds)}
        for way, rounds in of_rounds.items()
    }
    return {
        "rounds": options.rounds,
        "bytes": bytes_,
        "largest_tensor_bytes": largest_tensor(base),
        "adapter_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "ways": found,
        "of_copy": of_copy(found),
        "same_weights": alike,
        "of_rounds": of_rounds,
    }


def of_copy(ways: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the bandwidth of zerolora's merges as a share of cp's: of the whole time, and without that of a start."""
    shares = {}
    for key in ("seconds", "least_seconds"):
        copy, start = ways["cp"][key], ways["start"][key]
        for way in ("zerolora", "zerolora, hashed"):
            whole = ways[way][key]
            shares[f"{way}, {key}"] = {"whole": copy / whole, "without_start": copy / (whole - start)}
    return shares


def commands(folder: Path, llamafactory: Path | None) -> dict[str, list[str]]:
    """Return the command of each way; all write to folder/output."""
    base, adapter, output = (str(folder / name) for name in ("base", "adapter", "output"))
    zerolora = [sys.executable, "-m", "zerolora", "merge"]
    ways = {
        "zerolora": [*zerolora, "--base", base, "--adapter", adapter, "--output", output],
        "zerolora, hashed": [*zerolora, "--weights", f"{base}.json", "--adapter", adapter, "--output", output],
        "start": [
            *zerolora,
            "--base",
            f"{folder}/small/base",
            "--adapter",
            f"{folder}/small/adapter",
            "--output",
            output,
        ],
        "zerolora, rounded only": [sys.executable, "-c", PARTS, "product", base, adapter, output],
        "zerolora, bytes only": [sys.executable, "-c", PARTS, "sum", base, adapter, output],
        "peft": [sys.executable, "-c", PEFT, base, adapter, output],
        "cp": ["cp", "-r", "--reflink=auto", base, output],
        "cp, no reflink": ["cp", "-r", "--reflink=never", base, output],
    }
    if llamafactory:
        settings = {"model_name_or_path": base, "adapter_name_or_path": adapter, "export_dir": output}
        settings |= {"template": "default", "export_size": "5", "export_device": "cpu"}
        write_json(folder / "export.yaml", settings)
        ways["LLaMA-Factory"] = [str(llamafactory), "export", str(folder / "export.yaml")]
    return ways


def taken(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command and flush what it wrote; return what it took."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "src")}
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | quiet
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    pss = rss = 0
    while process.poll() is None:
        pss = max(pss, kilobytes(process.pid, "smaps_rollup", "Pss:"))
        rss = max(rss, kilobytes(process.pid, "status", "VmHWM:"))
        time.sleep(EVERY)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {(folder / 'log').read_text()[-2000:]}")
    for path in (folder / "output").glob("*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.monotonic() - begun,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "rss_bytes": rss * 1024,
        "pss_bytes": pss * 1024,
    }


def kilobytes(pid: int, file: str, key: str) -> int:
    """Return a value of /proc/PID; 0 of a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def write_model(folder: Path, sizes: dict[str, Any], rank: int) -> None:
    """Write base, adapter and what describes them; the numbers of each tensor are random and repeated."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{"tie_word_embeddings": False} | sizes, dtype="bfloat16")
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).mul_(0.02)

    def filled(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        numbers = drawn.to(dtype)
        return numbers.repeat(-(-tensor.numel() // DRAWN))[: tensor.numel()].reshape(tensor.shape).clone()

    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    write_tokenizer(base)
    shared = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in shared}
    files = list(shards(weights))
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        save_file({each: filled(weights[each], torch.bfloat16) for each in names}, base / name, {"format": "pt"})
        places |= dict.fromkeys(names, name)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        write_json(base / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter.mkdir()
    adapted.peft_config["default"].save_pretrained(str(adapter))
    factors = get_peft_model_state_dict(adapted)
    save_file(
        {name: filled(tensor, torch.float32) for name, tensor in factors.items()}, adapter / "adapter_model.safetensors"
    )
    write_json(adapter / "manifest.json", {"files": {}})
    write_json(folder / "base.json", {"path": str(base), "files": {}})


def write_tokenizer(base: Path) -> None:
    """Write a tokenizer of three tokens; LLaMA-Factory exports no model without one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token=None)).save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(base / "tokenizer_config.json", settings)


def shards(weights: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each weight file."""
    names: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if names and size + tensor.nbytes > SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def versions(command: Path) -> dict[str, str]:
    """Return the versions in the virtual environment of a command."""
    names = ("llamafactory", "torch", "transformers", "peft")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    python = command.parent / "python"
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is on."""
    return subprocess.run(
        ["stat", "--file-system", "--format=%T", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


def largest_tensor(base: Path) -> int:
    """Return the bytes of the largest tensor."""
    from zerolora.tensor_file import read_header

    return max(each.nbytes for path in base.glob("*.safetensors") for each in read_header(path).tensors.values())


def same(ours: Path, theirs: Path) -> bool:
    """Tell whether two directories hold the same tensors, in whatever files."""
    from zerolora.tensor_file import read_header

    files = [[read_header(path) for path in folder.glob("*.safetensors")] for folder in (ours, theirs)]
    one, other = ({name: each for file in found for name, each in file.tensors.items()} for found in files)
    alike = (torch.equal(each.read(), other[name].read()) for name, each in one.items() if name in other)
    return one.keys() == other.keys() and all(alike)


def markdown(found: dict[str, Any]) -> str:
    """Return the table of docs/merge.md."""
    lines = [
        "| model | way | wall time | least | written | peak resident | peak Pss |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, model in found["models"].items():
        for way, each in model["ways"].items():
            if way != "start":
                rate = model["bytes"] / each["seconds"] / 1e6
                rss, pss = each["rss_bytes"] / 1e9, each["pss_bytes"] / 1e9
                lines.append(
                    ROW.format(
                        size=size,
                        way=way,
                        rate=rate,
                        rss=rss,
                        pss=pss,
                        seconds=each["seconds"],
                        least=each["least_seconds"],
                    )
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
