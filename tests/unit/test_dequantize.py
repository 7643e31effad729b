"""Quantized checkpoints, which fetch converts to bf16: their values, files and refusals."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project, refusal
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from loopback_hub import REPOSITORY, REVISION, Hub, serving, use
from quantized_checkpoints import FORMATS, GROUP, Tensors, gptq, packed, saved_mxfp4, saved_quantized, sharded
from safetensors.torch import load_file, save_file
from test_merge import make_adapter

from zerolora.config.settings import FetchDirectory, FetchHub
from zerolora.fetch import dequantize
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.files import sha256
from zerolora.merge.merge import write_model
from zerolora.model import dequantized
from zerolora.model.dequantized import FROM
from zerolora.model.manifest import located
from zerolora.model.quantized import checkpoint
from zerolora.model.quantized.numbers import unpacked
from zerolora.model.stored_quantization import check_mergeable
from zerolora.tensor_file import write_one_by_one

FILE = "model.safetensors"
WEIGHT = "model.layers.0.self_attn.q_proj"
QUANTIZATION = "quantization_config"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make weights of several blocks."""
    monkeypatch.setattr(checkpoint, "BLOCK", 100)


def settings(path: Path) -> FetchDirectory:
    return FetchDirectory(path=str(path), license="MIT")


def read_checkpoint(directory: Path) -> checkpoint.Checkpoint:
    config = json.loads((directory / "config.json").read_text())[QUANTIZATION]
    return dequantized.read_checkpoint(directory, checkpoint.Stated(directory / "config.json", config))


def values_of(directory: Path, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Return the weights that tensors of this quantization_config are, in bf16."""
    save_file(tensors, directory / FILE, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({QUANTIZATION: config}))
    weights = read_checkpoint(directory).weights
    blocks = {each.name: [block.reshape(-1) for block in each.blocks()] for each in weights}
    assert all(len(each) > 1 for each in blocks.values())
    return {each.name: torch.cat(blocks[each.name]).reshape(each.shape).to(torch.bfloat16) for each in weights}


@pytest.mark.parametrize("kind", FORMATS)
def test_checkpoint_is_converted_value_by_value(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """And restored, with its origin in the manifest; an adapter is merged into it."""
    expected = saved_quantized(tiny_model, tmp_path / "source", kind)
    weights, model = tmp_path / "weights/it", tmp_path / "models/it"
    fetch(settings(tmp_path / "source"), weights, model)
    result = load_file(weights / FILE)
    assert result.keys() == expected.keys()
    assert all(result[name].dtype == each.dtype and result[name].equal(each) for name, each in expected.items())
    written = json.loads((weights / "config.json").read_text())
    assert QUANTIZATION not in written and written["dtype"] == "bfloat16"
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest[FROM] == FORMATS[kind][0] and manifest["converted"]
    before = sha256(weights / FILE)
    shutil.rmtree(weights)
    restore(model, weights)
    assert sha256(weights / FILE) == before and located(weights.with_name("it.json")) == weights
    assert not (tmp_path / "weights/.it.converting").exists()
    check_mergeable(weights)
    if kind == "gptq":
        merged = tmp_path / "merged"
        merged.mkdir()
        write_model(weights, [(make_adapter(tiny_model, tmp_path / "adapter"), 1.0)], merged, merged)
        changed = {name for name, each in load_file(merged / FILE).items() if not each.equal(expected[name])}
        assert changed and all(name.endswith("_proj.weight") for name in changed)


def test_fp8_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    reference: Any = Fp8Dequantize(None)
    torch.manual_seed(0)
    for scales in (torch.rand(3, 2), torch.randint(100, 140, (3, 2), dtype=torch.uint8), torch.rand(3, 2).bfloat16()):
        codes = torch.randn(48, 64).mul(30).to(torch.float8_e4m3fn)
        config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
        if scales.dtype == torch.uint8:
            config["scale_fmt"] = "ue8m0"
        ours = values_of(tmp_path, config, {"a.weight": codes, "a.weight_scale_inv": scales})
        assert ours["a.weight"].equal(reference._dequantize_one(codes, scales, torch.bfloat16))
    stacked = torch.randn(4, 48, 64).to(torch.float8_e4m3fn), torch.rand(4, 3, 2)
    ours = values_of(tmp_path, config | {"scale_fmt": "float"}, dict(zip(("a", "a_scale_inv"), stacked, strict=True)))
    assert ours["a"].equal(reference._dequantize_one(*stacked, torch.bfloat16))


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), count=st.integers(1, 70), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=60, deadline=None)
def test_codes_of_any_number_of_bits_are_unpacked(bits: int, rows: int, count: int, seed: int) -> None:
    """Also those of 3 bits, which begin in a word and end in the next, as GPTQ's do."""
    codes = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    assert unpacked(packed(codes, bits), bits, count).equal(codes.to(torch.int32))


def test_gptq_of_3_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored, values = gptq(torch.Size((64, 96)), 3, 1)
    config = {"quant_method": "gptq", "bits": 3, "group_size": GROUP, "desc_act": True, "sym": False}
    ours = values_of(tmp_path, config, {f"a.{name}": each for name, each in stored.items()})
    assert ours["a.weight"].equal(values.to(torch.bfloat16))
    (tmp_path / "config.json").write_text(json.dumps({QUANTIZATION: config}))
    save_file({"a.qweight": stored["qweight"][:-1].clone()}, tmp_path / FILE, {"format": "pt"})
    assert "has 8 rows of 32 bits, which are no whole number of 3 bits" in refusal(read_checkpoint, tmp_path)


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import dequantize_convertops

    torch.manual_seed(0)
    codes, scales = torch.randint(0, 256, (3, 40, 2, 16)), torch.randint(0, 250, (3, 40, 2))
    tensors = {"a_blocks": codes.to(torch.uint8), "a_scales": scales.to(torch.uint8)}
    ours = values_of(tmp_path, {"quant_method": "mxfp4"}, tensors)
    expected = dequantize_convertops(tensors["a_blocks"], tensors["a_scales"], torch.bfloat16)
    assert ours["a"].equal(expected)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not in the lock")
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_compressed_tensors_equal_their_own(scale: torch.dtype, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    cases = [("pack-quantized", "int", bits, way) for bits in (2, 4, 8) for way in ("channel", "group")]
    cases += [("int-quantized", "int", 8, way) for way in ("tensor", "channel", "group")]
    cases += [("float-quantized", "float", 8, way) for way in ("tensor", "channel", "block")]
    for format_, kind, bits, strategy in cases:
        for symmetric in {True, kind == "float"}:
            options: dict[str, Any] = {"group": {"group_size": GROUP}, "block": {"block_structure": [16, 24]}}
            args = QuantizationArgs(
                num_bits=bits, type=kind, strategy=strategy, symmetric=symmetric, **options.get(strategy, {})
            )
            size = {"tensor": (1,), "channel": (24, 1), "group": (24, 4), "block": (2, 3)}[strategy]
            state = {"weight": torch.randn(24, 64), "weight_scale": torch.rand(size).add(0.02).to(scale)}
            if not symmetric:
                half = 1 << (bits - 1)
                state["weight_zero_point"] = torch.randint(-half, half, size, dtype=torch.int8)
            one = QuantizationScheme(targets=["Linear"], weights=args)
            compressor: Any = BaseCompressor.get_value_from_registry(format_)
            stored = compressor.compress(state, one)
            groups = {"a": json.loads(one.model_dump_json())}
            config = {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups}
            ours = values_of(tmp_path, config, {f"a.{name}": each for name, each in stored.items()})
            assert ours["a.weight"].equal(compressor.decompress(stored, one)["weight"].to(torch.bfloat16))


def test_gpt_oss_is_converted(tiny_model: Path, tmp_path: Path) -> None:
    """Its experts are in MXFP4; embeddings, attention, routers and biases are not."""
    source = tmp_path / "source"
    expected = saved_mxfp4(tiny_model, source)
    fetch(settings(source), tmp_path / "weights/it", tmp_path / "models/it")
    result = load_file(tmp_path / "weights/it" / FILE)
    assert len(load_file(source / FILE)) == len(expected) + 2 and result.keys() == expected.keys()
    assert all(result[name].equal(each) for name, each in expected.items())


def test_model_of_the_hub_is_converted_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that is not converted is refused before weights are downloaded."""
    source, weights, model = tmp_path / "source", tmp_path / "weights/it", tmp_path / "models/it"
    expected = saved_quantized(tiny_model, source, "awq")
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "refused"))
    hub_settings = FetchHub(repository=REPOSITORY, revision=REVISION, license="MIT")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    config = json.loads(files["config.json"])
    gemv = json.dumps(config | {QUANTIZATION: config[QUANTIZATION] | {"version": "gemv"}}).encode()
    with serving(Hub(files | {"config.json": gemv})) as hub:
        use(monkeypatch, hub.endpoint)
        said = "quantization_config.version is 'gemv', and only 'gemm', 'GEMM' can be converted to bf16; use"
        assert said in refusal(fetch, hub_settings, weights, model)
        assert FILE not in hub.downloads()
        hub.files = files
        monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "store"))
        fetch(hub_settings, weights, model)
        downloads = len(hub.asked)
        shutil.rmtree(weights)
        restore(model, weights)
        assert len(hub.asked) == downloads and not [*(tmp_path / "store/downloads").iterdir()]
    assert all(each.equal(expected[name]) for name, each in load_file(weights / FILE).items())
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest[FROM]["quant_method"] == "awq" and manifest["source"]["revision"] == REVISION


def test_model_of_the_hub_stays_as_published(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dequantize: on_load, also in a store without hard links; nothing else is left on the disk."""
    source, weights, model = tmp_path / "source", tmp_path / "weights/it", tmp_path / "models/it"
    expected = saved_quantized(tiny_model, source, "awq")
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(Path, "hardlink_to", no_links)
    hub_settings = FetchHub(repository=REPOSITORY, revision=REVISION, dequantize="on_load")
    with serving(Hub({path.name: path.read_bytes() for path in source.iterdir()})) as hub:
        use(monkeypatch, hub.endpoint)
        fetch(hub_settings, weights, model)
        downloads = len(hub.asked)
        shutil.rmtree(weights)
        restore(model, weights)
        assert len(hub.asked) == downloads
    (blob,) = [path for path in (tmp_path / "store").rglob("*") if sha256_of(path) == sha256(source / FILE)]
    assert (weights / FILE).resolve() == blob
    read = {name: each.read() for file in dequantized.weight_headers(weights) for name, each in file.tensors.items()}
    assert all(each.equal(expected[name]) for name, each in read.items())


def no_links(*_: Any) -> None:
    raise OSError("no hard links")


def sha256_of(path: Path) -> str:
    return sha256(path) if path.is_file() else ""


@pytest.mark.parametrize("value", [0.0, 1e-7])
def test_bias_that_the_class_does_not_have_is_zero(value: float, tiny_model: Path, tmp_path: Path) -> None:
    """AutoGPTQ stores one for every module."""
    expected = saved_quantized(tiny_model, tmp_path / "source", "gptq")
    tensors = load_file(tmp_path / "source" / FILE)
    save_file(tensors | {f"{WEIGHT}.bias": torch.full((32,), value)}, tmp_path / "source" / FILE, {"format": "pt"})
    arguments = settings(tmp_path / "source"), tmp_path / "weights/it", tmp_path / "models/it"
    if value:
        assert f"its files contain '{WEIGHT}.bias', and a LlamaForCausalLM" in refusal(fetch, *arguments)
    else:
        fetch(*arguments)
        assert load_file(tmp_path / "weights/it" / FILE).keys() == expected.keys()


def test_killed_conversion_goes_on_with_what_is_left(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, weights = tmp_path / "source", tmp_path / "weights/it"
    expected = saved_quantized(tiny_model, source, "fp8, blocks")
    sharded(source)
    written: list[str] = []

    def killed(entries: Any, path: Path, *others: Any) -> None:
        write_one_by_one(entries, path, *others)
        written.append(path.name)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(dequantize, "write_one_by_one", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch(settings(source), weights, tmp_path / "models/it")
    assert not weights.exists()
    on_load = FetchDirectory(path=str(source), dequantize="on_load")
    shutil.copytree(tmp_path / "weights", tmp_path / "others")
    fetch(on_load, tmp_path / "others/it", tmp_path / "models/it")  # takes no file of the other conversion
    fetch(settings(source), weights, tmp_path / "models/it")
    assert len(written) == 3 and written[1] == written[2]
    index = json.loads((weights / f"{FILE}.index.json").read_text())
    result = {name: load_file(weights / file)[name] for name, file in index["weight_map"].items()}
    assert result.keys() == expected.keys() and all(each.equal(expected[name]) for name, each in result.items())
    assert index["metadata"]["total_size"] == sum(path.stat().st_size for path in weights.glob("*.safetensors"))


def test_full_disk_is_refused_first(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_quantized(tiny_model, tmp_path / "source", "awq")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    line = refusal(fetch, settings(tmp_path / "source"), tmp_path / "weights/it", tmp_path / "models/it")
    assert "takes 65.5 KiB in bf16, and 1e+03 B are free in" in line or "are free in" in line
    assert not [*(tmp_path / "weights").glob("**/*.safetensors")]


def stated(**changes: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config[QUANTIZATION].update(changes)


def stored(**changes: Any) -> Callable[[dict[str, Any], Tensors], None]:
    """Replace tensors of the first module by the end of their names; None removes one."""

    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for end, value in changes.items():
            tensors.pop(f"{WEIGHT}.{end}", None)
            if value is not None:
                tensors[f"{WEIGHT}.{end}"] = value

    return change


def with_group(_: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{WEIGHT}.weight_g_idx"] = torch.zeros(32, dtype=torch.int32)


def other_zeros(_: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{WEIGHT}.qzeros"] = torch.full_like(tensors[f"{WEIGHT}.qzeros"], -1)


def other_group(_: dict[str, Any], tensors: Tensors) -> None:
    tensors[f"{WEIGHT}.g_idx"][3] = 2


def mixed(config: dict[str, Any], _: Tensors) -> None:
    groups = config[QUANTIZATION]["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"]["weights"]["num_bits"] = 4
    config[QUANTIZATION]["format"] = "naive-quantized"


def left_over(config: dict[str, Any], tensors: Tensors) -> None:
    tensors.update({name: torch.zeros(2, 2) for name in [*tensors]})


CODES = torch.ones(32, 32).to(torch.float8_e4m3fn)
REFUSED: dict[str, tuple[str, Callable[[dict[str, Any], Tensors], None], str]] = {
    "no scale": ("fp8, blocks", stored(weight_scale_inv=None), "is stored as F8_E4M3, and no file has"),
    "two scales": ("fp8, blocks", stored(weight_scale=torch.ones(1)), "has two scales"),
    "scales of other blocks": (
        "fp8, blocks",
        stored(weight_scale_inv=torch.ones(2, 1)),
        "q_proj.weight_scale_inv' is F32 and [2, 1]; F32 and [2, 2] is expected, by quantization_config and",
    ),
    "unstated blocks": ("fp8, blocks", stated(weight_block_size=None), "has no weight_block_size; one scale, or one"),
    "block of one number": ("fp8, blocks", stated(weight_block_size=[128]), "weight_block_size is [128], and two"),
    "bytes of unknown meaning": (
        "fp8, powers of two",
        stated(scale_fmt="float"),
        "weight_scale_inv' is U8 and [32, 3]; F32 or F16 or BF16 or F8_E8M0 is expected",
    ),
    "another fp8": ("fp8, blocks", stated(fmt="e5m2"), "is stored as F8_E4M3, and no weight of fp8 has such a"),
    "key of tomorrow": ("fp8, blocks", stated(rotation="hadamard"), "rotation is 'hadamard', a key that is not known"),
    "not a number": (
        "fp8, rows",
        stored(weight_scale=torch.full((32, 1), torch.inf)),
        "has a number that is not finite",
    ),
    "codes without a use": ("fp8, rows", stored(codebook=CODES.view(torch.int8)), "is stored as I8, and no weight of"),
    "sparse": (
        "compressed-tensors, int4",
        stated(sparsity_config={"format": "sparse-24-bitmask"}),
        "which computes with other numbers than the stored ones",
    ),
    "another format": (
        "compressed-tensors, int4",
        stated(format="nvfp4-pack-quantized"),
        "quantization_config.format is 'nvfp4-pack-quantized', and only 'pack-quantized',",
    ),
    "reordered groups": ("compressed-tensors, int4", with_group, "q_proj.weight_g_idx' is stored as I32, and no"),
    "no zeros": ("compressed-tensors, int4", stored(weight_zero_point=None), "fits none of quantization_config.config"),
    "several schemes": ("compressed-tensors, int8", mixed, "fits several of quantization_config.config_groups"),
    "bits": ("gptq", stated(bits=5), "quantization_config.bits is 5, and only 2, 3, 4, 8 can be converted"),
    "bits of a module": ("gptq", stated(dynamic={"lm_head": {"bits": 8}}), "quantization_config.dynamic is"),
    "zero that libraries read differently": ("gptq", other_zeros, "has the highest code, which is a zero of 0 less 1"),
    "symmetric with other zeros": ("gptq", stated(sym=True), "has other zeros than 8, and sym is true"),
    "unknown group": ("gptq", other_group, "has inputs in other groups than desc_act, true, and 2 groups allow"),
    "groups out of order": ("gptq", stated(desc_act=False), "has inputs in other groups than desc_act, false"),
    "other size of groups": ("awq", stated(group_size=32), "is I32 and [1, 4] is expected" and "is expected, by"),
    "not quantized": ("awq", left_over, "states 'awq', and every tensor of the files is F32: the key was left"),
    "one weight stored twice": ("awq", stored(weight=torch.zeros(32, 32)), "are both model.layers.0.self_attn.q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_checkpoint_that_might_mean_something_else_is_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    kind, change, said = REFUSED[case]
    source = tmp_path / "source"
    saved_quantized(tiny_model, source, kind)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / FILE)
    change(config, tensors)
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / FILE, {"format": "pt"})
    line = refusal(fetch, settings(source), tmp_path / "weights/it", tmp_path / "models/it")
    assert said in line and line.startswith(str(source)) and "\n" not in line
    assert not [*(tmp_path / "weights").glob("**/*.safetensors")]


@pytest.mark.slow  # the whole pipeline, of which each stage is a process
def test_pipeline_with_a_base_dequantized_on_load(make_project: Callable[[str], Project], tiny_model: Path) -> None:
    project = make_project("gptq")
    shutil.rmtree(project.directory / "model")
    before = saved_quantized(tiny_model, project.directory / "model", "gptq")
    project.config["train"]["method"] = "qlora"
    project.config["fetch"]["directory"]["tiny"]["dequantize"] = "on_load"
    project.write_config()
    project.snakemake("all")
    merged = project.directory / "results/default/merged"
    assert QUANTIZATION not in json.loads((merged / "config.json").read_text())
    after = load_file(merged / FILE)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert after.keys() == before.keys() and changed and all("_proj.weight" in name for name in changed)
    published = project.directory / "model" / FILE
    assert sha256(project.directory / "resources/weights/tiny" / FILE) == sha256(published)
    estimates = json.loads((project.directory / "results/default/estimate.json").read_text())["strategies"]
    assert {each["disk"]["model"] for each in estimates} == {published.stat().st_size}
