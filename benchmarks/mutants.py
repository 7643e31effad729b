"""Read mutated files of every foreign kind and count the outcomes.

    nice .venv/bin/python benchmarks/mutants.py --cases 200 --seed 1

Mutates each kind --cases times, seeded. A case passes if the file is refused in one line, or read with the meaning that
an independent reader gives the same bytes. It fails with a traceback, another meaning, more than 10 s of CPU time, more
than 2 GiB, or a dead process. Each case is a fork with these limits. Adds the counts to benchmarks/results/mutants.json
and writes docs/checkpoints.md; exits with 1 if a case failed. Takes at most a tenth of a CPU-second a case.
"""

import bz2
import collections
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from measuring import RESULTS, children_cpu_seconds, machine, parser_of, put, table

from zerolora.bounded import bounded, within_bounds
from zerolora.config.file import read_values
from zerolora.config.resolve import json_object
from zerolora.data.example import BadRow
from zerolora.data.published import published
from zerolora.data.readers import chunks
from zerolora.errors import UserError, explained
from zerolora.fetch.model_sources import gguf_errors, read_gguf
from zerolora.files import read_json, write_json
from zerolora.json_file import read_text
from zerolora.model import foreign
from zerolora.model.architecture import tokenizer_of
from zerolora.model.read_spec import read_model_spec
from zerolora.tensor_file import read_header

RESULT = RESULTS / "mutants.json"
SECONDS, MEMORY = 10, 2 << 30
ODD = (
    *(b"-1", b"1e999", b"NaN", b"Infinity", b"9" * 500, b"null", b"true", b'"x"', b"[]", b"{}", b"[" * 2000),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\\ud800", b'"a": 1, "a": 2', b"../../x", b"/dev/zero", b"\r"),
    *(b"\x1a", b"!!bool x", b"&a [*a]", b"{{ 9 ** 9 ** 9 }}", b"{% for a in range(99999) %}"),
)
SAME = object()
"""Returned by a reader that has verified its result itself."""
BAD = ("another meaning", "traceback", "too slow", "too much memory", "dead process")


@dataclass(frozen=True)
class FileKind:
    """A kind of file."""

    name: str
    content: bytes
    read: Callable[[Path], Any]
    """The project's reader."""
    oracle: Callable[[bytes], Any]
    """An independent reader of the bytes; SAME if `read` verifies itself; raises if the bytes mean nothing."""


ROWS = [{"prompt": f"What is {n} + {n}?", "completion": f"{2 * n}, \u00e9\u4e2d"} for n in range(40)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    **{"rms_norm_eps": 1e-5, "eos_token_id": [1, 2], "tie_word_embeddings": True, "rope_scaling": None},
}
TOKENIZER = {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"1": {"content": "</s>"}}}
GENERATION = {"eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.7, "do_sample": True}
ADAPTER = {
    **{"peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj", "v_proj"], "use_dora": False},
    **{"rank_pattern": {"q_proj": 4}, "modules_to_save": None, "base_model_name_or_path": "some/base"},
}
MANIFEST = {"files": {"a.bin": {"sha256": "0" * 64, "bytes": 4}}, "base_model": {"name": "x", "weights": "0" * 64}}
TEMPLATE = b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
YAML = b"train:\n  learning_rate: 2.0e-4\n  epochs: 3\nruns:\n  default: {dataset: rows}\n  b: &a {x: [1, 2.5, ~]}\n"
README = (
    b"---\nlicense: mit\nconfigs:\n- config_name: small\n  data_files:\n  - {split: train, path: 's/*.jsonl'}\n"
    b"- config_name: default\n  data_files: &a [{split: test, path: [b/1.jsonl, b/2.jsonl]}]\n---\n# A data set\n"
)


def rows(path: Path) -> list[Any]:
    """Return the rows of a data file; a bad row refuses the file, as in prepare without `bad_row: drop`."""
    values = []
    for chunk in chunks(path):
        for source, value in chunk.records():
            if isinstance(value, BadRow):
                raise UserError(f"{source}: {value}")
            values.append(value)
    return values


def of_lines(text: bytes) -> list[Any]:
    """Return the rows of JSON lines."""
    lines = text.removeprefix(b"\xef\xbb\xbf").decode().split("\n")
    return [json.loads(line) for line in lines if line and not line.isspace()]


def of_csv(text: bytes) -> list[Any]:
    """Return the rows of CSV."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text.decode().removeprefix("\ufeff"), newline="\n"), strict=True)
    header = next(reader, [])
    return [dict(zip(header, cells, strict=True)) for cells in reader if cells]


def rows_as(format_: str) -> bytes:
    """Return the rows as a file of a table."""
    sink = io.BytesIO()
    content = pyarrow.Table.from_pylist(ROWS)
    if format_ == "parquet":
        pyarrow.parquet.write_table(content, sink)
    else:
        make = pyarrow.ipc.new_stream if format_ == "stream" else pyarrow.ipc.new_file
        with make(sink, content.schema) as writer:
            writer.write_table(content)
    return sink.getvalue()


def of_parquet(content: bytes) -> list[Any]:
    """Return the rows of a Parquet file."""
    return pyarrow.parquet.read_table(io.BytesIO(content), use_threads=False).to_pylist()


def of_arrow(content: bytes) -> list[Any]:
    """Return the rows of an Arrow file or stream."""
    opened = pyarrow.ipc.open_file if content[:6] == b"ARROW1" else pyarrow.ipc.open_stream
    table = opened(io.BytesIO(content)).read_all()
    table.validate(full=True)
    return table.to_pylist()


def whole(_: bytes) -> list[Any]:
    """Return the compressed rows; a checksum detects any other content."""
    return ROWS


def tensors(path: Path) -> Any:
    """Return dtype and shape of each tensor, from the project's reader."""
    return {name: (each.kind, list(each.shape)) for name, each in read_header(path).tensors.items()}


def of_tensors(content: bytes) -> Any:
    """Return dtype and shape of each tensor, from the header read by Python's json."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    return {name: (each["dtype"], each["shape"]) for name, each in header.items() if name != "__metadata__"}


def rendered(path: Path) -> Any:
    """Render a chat template within its bounds."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = read_text(path)
    try:
        with bounded("the chat template"):
            program = ImmutableSandboxedEnvironment().from_string(text)
        within_bounds("the chat template", lambda: program.render(messages=MESSAGES))
    except UserError:
        raise
    except Exception as error:  # as data/template.py: whatever a template raises rejects the row
        raise UserError(f"refuses it: {error}".splitlines()[0]) from None
    return SAME


def gguf_file() -> bytes:
    """Return a GGUF file of a tiny Llama."""
    import gguf
    import numpy as np

    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (8, 8) for name in ("up", "gate", "down")}
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(path := f"{folder}/model.gguf", "llama")
        writer.add_vocab_size(4)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(8)
        writer.add_head_count(2)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        for name, shape in shapes.items():
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(path).read_bytes()


def gguf_model(path: Path) -> Any:
    """Read the model in a GGUF file, as fetch does; it checks that all of it is read."""
    with gguf_errors():
        read_gguf(path)
    return SAME


def tokenizer_file() -> bytes:
    """Return a tokenizer.json with each kind of part."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = {"[UNK]": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "aab": 5}
    result = Tokenizer(models.BPE(words, [("a", "b"), ("a", "ab")], unk_token="[UNK]"))  # noqa: S106 (no password)
    result.add_special_tokens(["<s>"])
    result.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("c", "ab")])
    split = pre_tokenizers.Split(Regex(r"\s+|[a-z]{1,3}"), "isolated")
    result.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits()])
    result.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    result.decoder = decoders.Fuse()
    return result.to_str().encode()


def tokenized(path: Path) -> Any:
    """Load a tokenizer, and encode and decode a text."""
    tokenizer = tokenizer_of(path.parent)
    tokenizer.decode(tokenizer.encode("ab aab c 12 \u00e9\u4e2d" * 20))
    return SAME


def splits(path: Path) -> Any:
    """Read the `configs` of a data set's README.md, as prepare does."""
    published(path.parent, [path.parent / "train.jsonl"])
    return SAME


def tensor_file() -> bytes:
    """Return a safetensors file of two tensors."""
    header = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


def as_json(value: Any) -> bytes:
    """Return a value as the bytes of a JSON file."""
    return json.dumps(value, indent=2).encode()


def spec(path: Path) -> Any:
    """Read a model's config, and the spec of the memory model."""
    value = foreign.config_file(path)
    read_model_spec(path)
    return value


def csv_of_rows() -> bytes:
    """Return the rows as CSV."""
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(ROWS)
    return sink.getvalue().encode()


def beside(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a reader of a file from a reader of its directory."""
    return lambda path: read(path.parent)


class Exponents(yaml.SafeLoader):
    """PyYAML with YAML 1.2's numbers with an exponent."""


Exponents.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def of_yaml(content: bytes) -> Any:
    """Return the value that PyYAML reads."""
    return yaml.load(content, Exponents)  # noqa: S506 - a SafeLoader


def kinds() -> list[FileKind]:
    """Return every kind of file, with a valid example of each."""
    index = {"metadata": {"total_size": 24}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0"}
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}, "bf16": {"enabled": True}}
    return [
        FileKind("config.json", as_json(CONFIG), spec, json.loads),
        FileKind("tokenizer_config.json", as_json(TOKENIZER), beside(foreign.tokenizer_config), json.loads),
        FileKind("generation_config.json", as_json(GENERATION), beside(foreign.generation_config), json.loads),
        FileKind("model.safetensors.index.json", as_json(index), foreign.weight_index, json.loads),
        FileKind("adapter_config.json", as_json(ADAPTER), beside(foreign.adapter_config), json.loads),
        FileKind("manifest.json", as_json(MANIFEST), lambda p: foreign.manifest(p, "zerolora stage train"), json.loads),
        FileKind(
            "state.json",
            as_json(state),
            lambda p: foreign.saved_files(p.parent, "datasets"),
            lambda content: [each["filename"] for each in json.loads(content)["_data_files"]],
        ),
        FileKind("deepspeed.json", as_json(own), lambda p: json_object(p, "a DeepSpeed config"), json.loads),
        FileKind("stats.json", as_json(own), lambda p: read_json(p, "zerolora stage pack"), json.loads),
        FileKind("config.yaml", YAML, read_values, of_yaml),
        FileKind("README.md", README, splits, lambda content: SAME),
        FileKind("model.safetensors", tensor_file(), tensors, of_tensors),
        FileKind("model.gguf", gguf_file(), gguf_model, lambda content: SAME),
        FileKind("tokenizer.json", tokenizer_file(), tokenized, lambda content: SAME),
        FileKind("chat_template.jinja", TEMPLATE, rendered, lambda content: SAME),
        FileKind("rows.jsonl", LINES, rows, of_lines),
        FileKind("rows.csv", csv_of_rows(), rows, of_csv),
        FileKind("rows.parquet", rows_as("parquet"), rows, of_parquet),
        FileKind("file.arrow", rows_as("file"), rows, of_arrow),
        FileKind("stream.arrow", rows_as("stream"), rows, of_arrow),
        FileKind("rows.jsonl.gz", gzip.compress(LINES, mtime=0), rows, whole),
        FileKind("rows.jsonl.bz2", bz2.compress(LINES), rows, whole),
        FileKind("rows.jsonl.xz", lzma.compress(LINES), rows, whole),
    ]


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Return the content after one to three changes."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content) + 1)
        to = min(len(content), at + draw.choice((1, 2, 8, 64)))
        match draw.randrange(8):
            case 0:
                content = content[:at] + content[to:]
            case 1:
                content = content[:at]
            case 2:
                content = content[:at] + content[at:to] * 2 + content[to:]
            case 3:
                content = content[:at] + bytes(draw.randbytes(to - at)) + content[to:]
            case 4 | 5:
                content = content[:at] + draw.choice(ODD) + content[draw.choice((at, to)) :]
            case 6 if at < len(content):
                content = content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
            case _:
                begin = draw.randrange(len(content) + 1)
                content = content[:at] + content[begin : begin + to - at] + content[to:]
    return content


def outcome(kind: FileKind, path: Path) -> str:
    """Read a file and return the outcome."""
    content = path.read_bytes()
    try:
        value = kind.read(path)
    except UserError as error:
        return "traceback" if "\n" in str(error) else "refused"
    except OSError as error:  # as cli.py
        return "refused" if explained(error) else "traceback"
    except Exception as error:
        return "too much memory" if isinstance(error, MemoryError) else "traceback"
    with contextlib.suppress(Exception):
        if value is SAME or repr(value) == repr(kind.oracle(content)):
            return "read"
    return "another meaning"


def limited(kind: FileKind, path: Path) -> str:
    """Return the outcome of reading a file in a fork, within the limits."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with Path("/dev/null").open("w") as nothing:
                os.dup2(nothing.fileno(), 2)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            os.write(writing, pickle.dumps(outcome(kind, path)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if usage.ru_utime + usage.ru_stime > SECONDS - 1:
        return "too slow"
    return pickle.loads(answer) if answer and status == 0 else "dead process"  # noqa: S301 - our own child's


def campaign(cases: int, seed: int, chosen: list[FileKind] | None = None) -> dict[str, dict[str, int]]:
    """Return the number of cases by kind and outcome; print the failed ones with their content."""
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen or kinds():
            draw, ends = random.Random(f"{seed} {kind.name}"), collections.Counter[str]()  # noqa: S311
            path = Path(folder) / kind.name
            path.write_bytes(kind.content)
            kind.read(path)  # imports what forks would import each
            if (sound := limited(kind, path)) != "read":
                raise SystemExit(f"{kind.name}: the unmutated file ends with: {sound}")
            for number in range(cases):
                content = mutated(kind.content, draw)
                path.write_bytes(content)
                ends[end := limited(kind, path)] += 1
                if end in BAD:
                    print(f"{kind.name}, seed {seed}, case {number}: {end}: {content[:3000]!r}", file=sys.stderr)
            path.unlink()
            counts[kind.name] = dict(sorted(ends.items()))
    return counts


def markdown(result: Any) -> str:
    """Return the counts of all campaigns."""
    ends: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in result["campaigns"].values():
        for name, counts in each["kinds"].items():
            ends[name].update(counts)
    ends["all"] = sum(ends.values(), collections.Counter[str]())
    rows = [
        [name, *(f"{n:,}" for n in (each.total(), each["refused"], each["read"], sum(each[end] for end in BAD)))]
        for name, each in ends.items()
    ]
    return table(["mutated file", "cases", "refused in one line", "read with its own meaning", "anything else"], rows)


def main() -> None:
    """Run a campaign and add its counts to the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=200, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", metavar="FILE", help="by default, all")
    options = parser.parse_args()
    begun = time.process_time() + children_cpu_seconds()
    chosen = [kind for kind in kinds() if not options.kinds or kind.name in options.kinds]
    counts = campaign(options.cases, options.seed, chosen)
    spent = time.process_time() + children_cpu_seconds() - begun
    campaigns = json.loads(RESULT.read_text(encoding="utf-8"))["campaigns"] if RESULT.exists() else {}
    campaigns[str(options.seed)] = {"cpu_seconds": round(spent, 1), "kinds": counts}
    result = {"machine": machine(), "seconds": SECONDS, "memory_bytes": MEMORY, "campaigns": campaigns}
    write_json(RESULT, result)
    put("checkpoints.md", "mutants", markdown(result))
    total = sum(map(collections.Counter, counts.values()), collections.Counter[str]())
    print(dict(total), f"{spent:.0f} CPU-s")
    sys.exit(any(total[each] for each in BAD))


if __name__ == "__main__":
    main()
