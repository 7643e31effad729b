"""`zerolora merge --base`: memory, no partial output, one line for each mistake, QLoRA's dequantized base."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_merge import make_adapter, shard

from zerolora import cli
from zerolora.errors import UserError, explained
from zerolora.files import describe
from zerolora.merge import merge as merging
from zerolora.merge import stream
from zerolora.merge.listed import listed_model
from zerolora.merge.user_merge import merge_by_hand
from zerolora.tensor_file import read_header
from zerolora.train.launch.stop_signals import Stopped
from zerolora.units import byte_size


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    return make_adapter(tiny_model, tmp_path / "adapter")


def merge(*arguments: object) -> None:
    """Call the command in this process."""
    cli.app(["merge", *map(str, arguments)], standalone_mode=False)


def outputs_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"adapter", "base", "disk"}


PEAK = """
import json, sys
from pathlib import Path
import torch
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.merge.user_merge import merge_by_hand
from zerolora.machine.peak_memory import PeakMemory
first, *cases = json.loads(sys.argv[1])
for base, _, _ in cases:
    built_on_meta(config_of(Path(base)))
def merge(base, adapter, output):
    merge_by_hand(Path(base), [Path(adapter)], [], Path(output))
merge(*first)
for case in cases:
    peak = PeakMemory(torch.device("cpu"))
    before = peak.host()
    merge(*case)
    print(peak.host() - before)
"""
LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 4096},
    "qwen3_moe": {"hidden_size": 512, "num_experts": 8, "moe_intermediate_size": 512, "num_hidden_layers": 16,
                  "vocab_size": 64},
}  # fmt: skip


def peaks_of(cases: Iterable[str], listed: list[list[str]]) -> dict[str, int]:
    """Return by how many bytes each merge after the first raised the peak memory of one process."""
    out = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(listed)], capture_output=True, text=True, check=True, timeout=120
    )
    return dict(zip(cases, (int(line) for line in out.stdout.split() if line.isdigit()), strict=True))


def large(family: str, folder: Path, max_shard: str) -> tuple[Path, Path]:
    """Write a model in bf16 and an adapter of all its linear modules."""
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING

    from zerolora.model.architecture import auto_class

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    config = CONFIG_MAPPING[family](**(LARGE[family] | heads))
    with torch.device("meta"):
        model = auto_class(config).from_config(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(folder / "base", max_shard_size=max_shard)
    targets: Any = ["gate_proj", "up_proj", "down_proj"] if family == "qwen3_moe" else "all-linear"
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(str(folder / "adapter"))
    return folder / "base", folder / "adapter"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    """Models of 170 to 230 MB, in one file and in several, and one whose experts transformers joins to one weight a
    layer."""
    cases = {"llama": ("llama", "10GB"), "sharded": ("llama", "60MB"), "experts": ("qwen3_moe", "60MB")}
    made = {name: large(family, tmp_path / name, size) for name, (family, size) in cases.items()}
    listed = [[str(tiny_model), str(adapter), str(tmp_path / "first")]]
    listed += [[str(base), str(own), str(base.parent / "merged")] for base, own in made.values()]
    peaks = peaks_of(cases, listed)
    files = {name: len(list(base.glob("*.safetensors"))) for name, (base, _) in made.items()}
    assert files["llama"] == 1 and files["sharded"] > 2
    matrix, experts, trained = 2 * 1024 * 4096, 2 * 8 * 2 * 512 * 512, 2**22
    threads = min(len(os.sched_getaffinity(0)), stream.THREADS) * (stream.SPAN + 3 * 4 * stream.BLOCK)
    again: dict[str, int] = {}
    for name in cases:
        total = sum(path.stat().st_size for path in made[name][0].glob("*.safetensors"))
        held = (5 * experts if name == "experts" else 3 * matrix) + trained + threads
        if peaks[name] >= held and not again:  # seen once, by 5 %, on a busy machine
            for _, _, output in listed:
                shutil.rmtree(output)
            again = peaks_of(cases, listed)
        peaks[name] = again.get(name, peaks[name])
        assert peaks[name] < held < total / 2, (name, peaks, total)


BY_LIST = """
import sys
from zerolora import cli
cli.app(["merge", *sys.argv[1:]], standalone_mode=False)
assert "torch" in sys.modules
print(*sorted({"peft", "scipy", "transformers"} & set(sys.modules)))
"""


def test_plain_lora_merges_without_transformers(
    tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bytes as after building the model class."""
    options = ["--base", tiny_model, "--adapter", adapter, "--output"]
    command = [sys.executable, "-c", BY_LIST, *map(str, options), str(tmp_path / "listed")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert out.stdout.splitlines()[-1] == ""
    monkeypatch.setattr(merging, "listed_model", lambda *_: None)
    merge(*options, tmp_path / "built")
    for path in (tmp_path / "built").iterdir():
        assert path.read_bytes() == (tmp_path / "listed" / path.name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_merge_leaves_no_output(
    number: signal.Signals, tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, write, calls = [signal.getsignal(number)], stream._write, []

    def stopping(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 5:
            os.kill(os.getpid(), number)
        write(*arguments)

    monkeypatch.setattr(stream, "_write", stopping)
    with pytest.raises(Stopped, match=rf"stopped by {number.name}; .*merged is unchanged"):
        merge("--base", shard(tiny_model, tmp_path / "base"), "--adapter", adapter, "--output", tmp_path / "merged")
    assert outputs_in(tmp_path) == set()
    assert [signal.getsignal(number)] == handlers


def test_leftovers_of_a_killed_merge_are_removed(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    left = tmp_path / f".merged.{os.uname().nodename}.{child.pid}.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    merge("--base", tiny_model, "--adapter", adapter, "--output", tmp_path / "merged")
    assert outputs_in(tmp_path) == {"merged"}


def untying_adapter(base: Path, folder: Path) -> Path:
    """Write an adapter of the head of a tied base: the merge unties it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.mark.parametrize("shards", [False, True])
def test_full_disk_is_one_line_and_counts_an_untied_head(
    shards: bool, tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system with room for the base and less than its head. Nothing is written before the refusal."""
    base = shard(tiny_model, tmp_path / "base") if shards else tiny_model
    untying = untying_adapter(base, tmp_path / "untying")
    merge("--base", base, "--adapter", untying, "--output", tmp_path / "merged")
    merged = tmp_path / "merged"
    tensors = {name: each for path in merged.glob("*.safetensors") for name, each in load_file(path).items()}
    head = tensors["lm_head.weight"].nbytes
    room = sum(-(-path.stat().st_size // 4096) * 4096 for path in base.iterdir()) + 16384
    assert head > 16384
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        merge("--base", base, "--adapter", adapter, "--output", disk / "merged")
        shutil.rmtree(disk / "merged")
        monkeypatch.setattr(stream, "apply", lambda *_: pytest.fail("merged on a full disk"))
        size = byte_size(sum(path.stat().st_size for path in merged.glob("*.safetensors")))
        with pytest.raises(UserError, match=f"merged: the merged weights take {size}, and .* are free there"):
            merge("--base", base, "--adapter", untying, "--output", disk / "merged")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    if shards:
        index = json.loads((merged / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
        assert set(index["weight_map"]) == set(tensors)


def test_file_size_limit_is_one_line(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:  # its errno is checked below
            merge("--base", tiny_model, "--adapter", adapter, "--output", tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    line = explained(raised.value)
    assert "merged/model.safetensors: File too large; raise the limit" in line and "\n" not in line
    assert outputs_in(tmp_path) == set()


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EOPNOTSUPP, 0], ids=["EXDEV", "EOPNOTSUPP", "nothing copied"])
def test_bytes_are_the_same_without_copy_file_range(
    refusal: int, tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> int:
        if refusal:
            raise OSError(refusal, "no")
        return 0

    merge_by_hand(tiny_model, [adapter], [], tmp_path / "one")
    monkeypatch.setattr(os, "copy_file_range", copy)
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "other")
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_copies_are_aligned_blocks_that_file_systems_can_share(
    tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned in both files, except before the first block of adjacent tensors."""
    monkeypatch.setattr(stream, "ALIGNED", 64)
    monkeypatch.setattr(stream, "COPIED", 256)
    monkeypatch.setattr(stream, "_copy", lambda *arguments: copies.append(arguments))
    copies: list[Any] = []
    merge("--base", tiny_model, "--adapter", adapter, "--output", tmp_path / "merged")
    runs: list[list[Any]] = []
    for copied in sorted(copies, key=lambda each: each[1]):
        if runs and copied[1] == runs[-1][-1][2]:
            runs[-1].append(copied)
        else:
            runs.append([copied])
    assert max(map(len, runs)) > 2
    assert all(start % 64 == 0 == offset % 64 for run in runs for _, start, _, _, offset in run[1:])
    assert all(stop - start <= 256 for _, start, stop, _, _ in copies)


def test_one_thread_at_a_time_writes_a_file(
    tmp_path: Path, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting threads sleep, where ext4 would spin; others compute meanwhile."""
    write = os.pwrite
    writing: list[int] = []
    threads: set[int] = set()
    most = 0

    def slow(handle: int, data: memoryview, offset: int) -> int:
        nonlocal most
        writing.append(handle)
        threads.add(threading.get_ident())
        most = max(most, writing.count(handle))
        time.sleep(0.01)
        writing.remove(handle)
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    merge("--base", tiny_model, "--adapter", adapter, "--output", tmp_path / "merged")
    assert len(threads) > 2 and most == 1


def _config(which: int, name: str, **edits: Any) -> Callable[[Path, Path], object]:
    """Return a change of a JSON file of the base (0) or the adapter (1)."""

    def edit(*folders: Path) -> None:
        path = folders[which] / name
        path.write_text(json.dumps(json.loads(path.read_text()) | edits))

    return edit


def _model(**edits: Any) -> Callable[[Path, Path], object]:
    return _config(0, "config.json", **edits)


def _adapter(**edits: Any) -> Callable[[Path, Path], object]:
    return _config(1, "adapter_config.json", **edits)


def _damaged(change: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    return lambda _, adapter: change(adapter / "adapter_model.safetensors")


def _narrow(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)


REFUSED: dict[str, tuple[Callable[[Path, Path], object], tuple[str, ...], str]] = {
    "a quantized base": (
        _model(quantization_config={"quant_method": "gptq"}),
        (),
        "config.json: quantization_config: states .gptq., and every tensor of the files is F32",
    ),
    "no base": (lambda base, _: shutil.rmtree(base), (), "--base: .*: there is no such directory"),
    "no adapter": (lambda _, adapter: shutil.rmtree(adapter), (), "--adapter: .*: there is no such directory"),
    "pickled": (
        lambda _, adapter: (adapter / "adapter_model.safetensors").unlink(),
        (),
        r"adapter_model\.safetensors: there is no such file; save the adapter with save_pretrained",
    ),
    "cut short": (
        _damaged(lambda path: os.truncate(path, path.stat().st_size - 1)),
        (),
        r"adapter_model\.safetensors: is not a whole safetensors file",
    ),
    "another kind": (_adapter(peft_type="LOHA"), (), "peft_type is 'LOHA', which cannot be merged"),
    "another shape": (
        _damaged(_narrow),
        (),
        r"is \[4, 47\], and should be \[4, 48\] in this base: its module has other sizes \(47 instead of 48\); use",
    ),
    "weights and no adapters": (
        lambda *_: None,
        ("--weight", "1", "--weight", "2"),
        "--weight appears 2 times, and --adapt",
    ),
    "no word of quantization": (
        lambda *_: None,
        ("--dequantized",),
        "manifest.json: has no quantization, so it is unknown",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unmergeable_input_is_one_line(case: str, tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    prepare, options, said = REFUSED[case]
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    prepare(base, adapter)
    with pytest.raises(UserError, match=said) as raised:
        merge("--base", base, "--adapter", adapter, "--output", tmp_path / "merged", *options)
    assert "\n" not in str(raised.value)
    assert outputs_in(tmp_path) == set()


def _renamed(base: Path, adapter: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    save_file({f"old.{name}": tensor for name, tensor in tensors.items()}, base / "model.safetensors")


def _further(base: Path, adapter: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"rotary.inv_freq": torch.ones(2)}, base / "model.safetensors")


UNLISTED: dict[str, Callable[[Path, Path], object]] = {
    "other names": _renamed,
    "one more tensor": _further,
    "an unknown family": _model(model_type="mamba"),
    "another size": _model(intermediate_size=1),
    "a broken size": _model(intermediate_size="x"),
    "experts": _adapter(target_parameters=["experts.down_proj"]),
    "trained rows": _adapter(trainable_token_indices=[3]),
    "added tokens": lambda _, adapter: (adapter / "tokens.json").write_text("[]"),
    "full fine-tuning": lambda _, adapter: (adapter / "adapter_config.json").unlink(),
}


@pytest.mark.parametrize("case", UNLISTED)
def test_unlisted_weights_need_the_model_class(case: str, tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)

    def listed() -> object:
        return listed_model(base, [read_header(base / "model.safetensors")], [adapter])

    assert listed() is not None
    UNLISTED[case](base, adapter)
    assert listed() is None


def test_occupied_output_is_refused(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (tmp_path / "merged").mkdir()
    merge("--base", base, "--adapter", adapter, "--output", tmp_path / "merged")  # an empty directory is free
    before = {path: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    with pytest.raises(UserError, match="--output: .*merged: exists already; choose another directory"):
        merge("--base", base, "--adapter", adapter, "--output", tmp_path / "merged")
    assert {path: path.read_bytes() for path in (tmp_path / "merged").iterdir()} == before
    with pytest.raises(UserError, match="--output: .*: is inside the base .*; choose a directory outside"):
        merge("--base", base, "--adapter", adapter, "--output", base / "merged")


def test_only_lora_factors_can_be_weighted(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    dora = make_adapter(tiny_model, tmp_path / "adapter" / "dora", use_dora=True)
    with pytest.raises(UserError, match="dora: the update of .* has more than LoRA factors, so it cannot be weighted"):
        merge_by_hand(tiny_model, [adapter, dora], [0.5, 0.5], tmp_path / "merged")


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_invalid_weight_is_one_line(weight: float, tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    with pytest.raises(
        UserError, match=f"--weight: {weight:g} times an adapter is not a model, or the base itself; use"
    ):
        merge_by_hand(tiny_model, [adapter], [weight], tmp_path / "merged")


def test_adapters_of_differently_quantized_bases_are_refused(tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    other = make_adapter(tiny_model, tmp_path / "base" / "other")
    both = [adapter, other]

    def merged(first: str, second: str | None) -> None:
        for folder, kind in zip(both, (first, second), strict=True):
            manifest: dict[str, Any] = {"files": {}}
            if kind:
                manifest["quantization"] = {"type": kind, "double": True, "precision": "fp32"}
            (folder / "manifest.json").write_text(json.dumps(manifest))
        merge_by_hand(tiny_model, both, [0.5, 0.5], tmp_path / "merged", dequantized=True)

    said = "--dequantized: .*other was trained on a base quantized as type int8, double True, precision fp32, and .* as"
    with pytest.raises(UserError, match=rf"{said} type nf4, double True, precision fp32; merge them into the original"):
        merged("nf4", "int8")
    with pytest.raises(UserError, match=r"other/manifest\.json: has no quantization, so it is unknown"):
        merged("nf4", None)
    assert outputs_in(tmp_path) == set()
    merged("nf4", "nf4")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokens.json", "README.md"])
def test_adapter_files_must_match_their_manifest(name: str, tmp_path: Path, tiny_model: Path, adapter: Path) -> None:
    """Files that decide what the tensors mean must match; a card may be edited on the hub."""
    files = describe(adapter) | {name: {"sha256": "0" * 64, "bytes": 1}}
    (adapter / "manifest.json").write_text(json.dumps({"files": files}))
    if name == "README.md":
        (adapter / name).write_text("edited")
        merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
        return
    with pytest.raises(
        UserError, match=rf"{name}: (is|there is) not the file that .*manifest\.json lists; bring that fi"
    ):
        merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    (adapter / "manifest.json").write_text('{"name": "x", "version": 1}')  # of another tool
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")


@pytest.fixture
def roomy(tmp_path: Path, tiny_model: Path) -> Path:
    """Return a base with more embedding rows than tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "base"
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(300)
    model.save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "the base's"
    tokenizer.save_pretrained(base)
    return base


TOOL = "<|tool|>"


def with_tokenizer(base: Path, adapter: Path, template: str | None = "the adapter's") -> Path:
    """Save a tokenizer with two more tokens with the adapter, as trl, axolotl and unsloth do."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([TOOL, "<|think|>"], special_tokens=True)
    tokenizer.eos_token = TOOL
    tokenizer.chat_template = template
    tokenizer.save_pretrained(adapter)
    return adapter


@pytest.mark.parametrize("form", ["a file", "inside", "none"])
def test_merged_model_has_the_adapters_tokenizer(form: str, tmp_path: Path, roomy: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    adapter = make_adapter(roomy, tmp_path / "adapter")
    with_tokenizer(roomy, adapter, None if form == "none" else "the adapter's")
    if form == "inside":
        (adapter / "chat_template.jinja").unlink()
        path = adapter / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "the adapter's"}))
    ends = GenerationConfig.from_pretrained(roomy).eos_token_id
    merge_by_hand(roomy, [adapter], [], tmp_path / "merged")
    merged, own = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "merged", adapter))
    assert merged.get_vocab() == own.get_vocab() and merged.eos_token == TOOL
    assert merged.chat_template == ("the base's" if form == "none" else "the adapter's")
    stops = GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id
    assert stops == [*([ends] if isinstance(ends, int) else ends), own.convert_tokens_to_ids(TOOL)]


def test_merged_model_has_the_adapters_template_and_stop_tokens(
    tmp_path: Path, tiny_model: Path, adapter: Path
) -> None:
    """As `zerolora stage train` writes them."""
    (adapter / "chat_template.jinja").write_text("own")
    (adapter / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (adapter / name).read_bytes()
    other = make_adapter(tiny_model, tmp_path / "base" / "other")
    merge_by_hand(tiny_model, [adapter, other], [0.5, 0.5], tmp_path / "disk")
    assert not (tmp_path / "disk/chat_template.jinja").exists() or (
        (tmp_path / "disk/chat_template.jinja").read_text() != "own"
    )


def test_tokenizer_of_another_base_is_one_line(tmp_path: Path, tiny_model: Path, roomy: Path, adapter: Path) -> None:
    with_tokenizer(roomy, adapter)
    with pytest.raises(
        UserError, match=r"tokenizer\.json: '<.*>' is token 2\d\d, and the base has 2\d\d rows of its embe"
    ):
        merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    path = adapter / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["a"], values["model"]["vocab"]["b"] = (values["model"]["vocab"][key] for key in ("b", "a"))
    path.write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"tokenizer\.json: '[ab]' is token \d+, and \d+ of the base's tokenizer; use t"
    ):
        merge_by_hand(roomy, [adapter], [], tmp_path / "merged")
    assert outputs_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("kind", "double"), [("nf4", True), ("fp4", False), ("int8", True)], ids=["nf4 double", "fp4", "int8"]
)
def test_dequantized_base_is_the_trained_one(
    kind: str, double: bool, tmp_path: Path, tiny_model: Path, adapter: Path
) -> None:
    """The merged logits match the quantized model with its adapter; those from the original base do not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from zerolora.compat.bitsandbytes_patches import keep_layout

    quantization = {"type": kind, "double": double, "precision": "fp32"}
    (adapter / "manifest.json").write_text(json.dumps({"files": {}, "quantization": quantization}))
    settings: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
        settings["bnb_4bit_compute_dtype"] = torch.float32
    quantized: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**settings)
    )
    keep_layout(quantized)
    tokens = torch.randint(3, 250, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trained = PeftModel.from_pretrained(quantized, str(adapter)).train()  # evaluated, int8 rounds activations too
        expected = trained(tokens).logits

        def distance(*options: str) -> float:
            output = tmp_path / f"merged{len(options)}"
            merge("--base", tiny_model, "--adapter", adapter, "--output", output, *options)
            merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
            return float((merged(tokens).logits - expected).abs().max() / expected.abs().max())

        dequantized, original = distance("--dequantized"), distance()
    assert dequantized < 1e-4
    assert original > 50 * dequantized
