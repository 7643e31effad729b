"""Measure merging an adapter against peft's merge_and_unload, LLaMA-Factory's export and a plain copy.

    .venv/bin/python benchmarks/merge/compare.py [--llamafactory VENV/bin/llamafactory-cli]

Writes a model of random bf16 weights of each size, with a LoRA adapter of all its linear modules, and merges it in
rounds whose order rotates: by `zerolora merge`, by hand, which writes no hashes, and as a stage, which does; by peft,
from_pretrained to save_pretrained; by `cp`, in the kernel or with --reflink=never through its own buffer. Each is a
separate process, which ends with its files flushed to disk. "start" merges a model of kilobytes: the rest of the time
depends on the bytes. "rounded only" is zerolora's merge without the product, which converts the numbers to fp32 and
back; "bytes only" converts none, so it reads and writes like a copy, but in a Python process with torch. Measures wall
and CPU seconds, peak resident set (VmHWM) and peak memory with shared pages counted once (Pss, every 50 ms): medians of
the rounds, and the least wall seconds, which other work on the machine disturbs least. Before each, base and adapter
are dropped from the page cache (posix_fadvise) and read again, so that all read from memory; then --settle seconds
pass, since a virtual machine may return the memory of removed files to its host, and getting it back costs as much as a
copy. Needs disk for three copies of the largest model. Writes benchmarks/results/merge.json and prints its table.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import RESULTS, ROOT, children_cpu_seconds, kernel_sizes, machine, medians, parser_of, table

from zerolora.files import write_json
from zerolora.tensor_file import read_header

# Llama's shapes: config.json of TinyLlama-1.1B, Llama-3.2-3B and Llama-2-7B.
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
"""Maximum bytes of a weight file."""
DRAWN = 4_000_003
"""Random numbers, repeated for each tensor: the cost of merging does not depend on them."""
EVERY = 0.05
"""Seconds between two samples of Pss."""
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
skipped, base, adapter, output = sys.argv[1:]
if skipped == "product":
    lora.Product.apply = lambda self, rows, first: None
else:
    stream.apply = lambda update, rows, first: None
merge_by_hand(Path(base), [Path(adapter)], [], Path(output))
"""
COLUMNS = ("model", "way", "wall time", "least", "written", "peak resident", "peak Pss")


def main() -> None:
    """Merge in every way, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "3B", "7B"])
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=5, help="seconds before each merge")
    parser.add_argument("--folder", type=Path, help="where models are written; default: a temporary folder")
    parser.add_argument("--llamafactory", type=Path, help="llamafactory-cli of a virtual environment")
    options = parser.parse_args()
    stat = ["stat", "--file-system", "--format=%T", str(options.folder or tempfile.gettempdir())]
    result: dict[str, Any] = machine(("torch", "transformers", "peft", "safetensors")) | {
        "page_cache": "warm",
        "rank": options.rank,
        "settle_seconds": options.settle,
        "file_system": subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip(),
        "threads": len(os.sched_getaffinity(0)),
        "llamafactory": versions(options.llamafactory) if options.llamafactory else "unmeasured: not given",
        "models": {},
    }
    for size in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            write_model(folder, MODELS[size], options.rank)
            (folder / "small").mkdir()
            write_model(folder / "small", MODELS["tiny"], options.rank)
            ways = commands(folder, options.llamafactory)
            result["models"][size] = compared(folder, ways, options.rounds, options.settle)
            write_json(RESULTS / "merge.json", result)
    print(markdown(result))


def compared(folder: Path, ways: dict[str, list[str]], rounds: int, settle: float) -> dict[str, Any]:
    """Return the medians and rounds of each way."""
    base, adapter = folder / "base", folder / "adapter"
    of_rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    outputs: dict[str, Path] = {}
    for number in range(rounds):
        for way in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
            for path in [*base.iterdir(), *adapter.iterdir()]:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
            for output in (folder / "output", folder / "work"):
                shutil.rmtree(output, ignore_errors=True)
            os.sync()
            time.sleep(settle)
            of_rounds[way].append(measured(ways[way], folder))
            print(f"{way}: {of_rounds[way][-1]}", flush=True)
            if number == rounds - 1 and way in ("zerolora", "peft"):
                outputs[way] = (folder / "output").rename(folder / f"by {way}")
                if len(outputs) == 2:
                    equal = same(*outputs.values())
                    for output in outputs.values():
                        shutil.rmtree(output)
    result: dict[str, Any] = {
        way: medians(each) | {"least_seconds": min(one["seconds"] for one in each)} for way, each in of_rounds.items()
    }
    tensors = [each for path in base.glob("*.safetensors") for each in read_header(path).tensors.values()]
    return {
        "rounds": rounds,
        "bytes": sum(path.stat().st_size for path in base.glob("*.safetensors")),
        "largest_tensor_bytes": max(each.nbytes for each in tensors),
        "adapter_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "ways": result,
        "of_copy": of_copy(result),
        "same_weights": equal,
        "of_rounds": of_rounds,
    }


def of_copy(ways: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the bandwidth of zerolora's merges as a share of cp's, with and without the time of a start."""
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
    stage = [sys.executable, "-m", "zerolora", "stage", "merge", "--settings", "{}"]
    ways = {
        "zerolora": [*zerolora, "--base", base, "--adapter", adapter, "--output", output],
        "zerolora, hashed": [*stage, "--weights", f"{base}.json", "--adapter", adapter, "--output", output],
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


def measured(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command, flush its output to disk, and return times and memory."""
    before, begun = children_cpu_seconds(), time.monotonic()
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "src")}
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | quiet
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    pss = rss = 0
    while process.poll() is None:
        pss = max(pss, kernel_sizes(process.pid, "smaps_rollup")["Pss"])
        rss = max(rss, kernel_sizes(process.pid, "status")["VmHWM"])
        time.sleep(EVERY)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {(folder / 'log').read_text()[-2000:]}")
    for path in (folder / "output").glob("*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {
        "seconds": time.monotonic() - begun,
        "cpu_seconds": children_cpu_seconds() - before,
        "rss_bytes": rss,
        "pss_bytes": pss,
    }


def write_model(folder: Path, sizes: dict[str, Any], rank: int) -> None:
    """Write base and adapter with their manifests; the numbers of each tensor are random and repeated."""
    from huggingface_hub import split_torch_state_dict_into_shards
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
    split = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD)
    for file, names in split.filename_to_tensors.items():
        save_file({name: filled(weights[name], torch.bfloat16) for name in names}, base / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(base / "model.safetensors.index.json", index)
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
    """Write a tokenizer of three tokens, without which LLaMA-Factory exports no model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token=None)).save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(base / "tokenizer_config.json", settings)


def versions(command: Path) -> dict[str, str]:
    """Return the versions in the virtual environment of a command."""
    names = ("llamafactory", "torch", "transformers", "peft")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    python = command.parent / "python"
    result: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return result


def same(ours: Path, theirs: Path) -> bool:
    """Return whether two directories hold equal tensors, in whatever files."""
    files = [[read_header(path) for path in folder.glob("*.safetensors")] for folder in (ours, theirs)]
    one, other = ({name: each for file in result for name, each in file.tensors.items()} for result in files)
    alike = (torch.equal(each.read(), other[name].read()) for name, each in one.items() if name in other)
    return one.keys() == other.keys() and all(alike)


def markdown(result: dict[str, Any]) -> str:
    """Return the table of docs/export.md."""
    rows = [
        (
            size,
            way,
            f"{each['seconds']:.1f} s",
            f"{each['least_seconds']:.1f} s",
            f"{model['bytes'] / each['seconds'] / 1e6:.0f} MB/s",
            f"{each['rss_bytes'] / 1e9:.2f} GB",
            f"{each['pss_bytes'] / 1e9:.2f} GB",
        )
        for size, model in result["models"].items()
        for way, each in model["ways"].items()
        if way != "start"
    ]
    return table(COLUMNS, rows)


if __name__ == "__main__":
    main()
