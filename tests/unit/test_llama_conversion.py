"""InternLM2 and Baichuan of 7B, read as a Llama: logits, tokens, refusals, and the pipeline.

The forward passes here are the published ones, written in plain torch on the published tensors.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project
from loopback_hub import REPOSITORY, REVISION, Hub, serving, use
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers_of import TEXT
from torch.nn.functional import linear, normalize, silu, softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerolora.config.settings import FetchDirectory, FetchHub
from zerolora.errors import UserError
from zerolora.fetch.llama_conversion import convert
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.files import sha256
from zerolora.model.manifest import located
from zerolora.model.read_spec import read_model_spec

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, WIDTH = 32, 48, 2, 4, 2, 8
Tensors = dict[str, torch.Tensor]
EPSILON = 1e-5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
INTERNLM2: dict[str, Any] = {
    **SIZES,
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    "attn_implementation": "eager",
    "model_type": "internlm2",
    "bias": True,
    "num_key_value_heads": KEY_HEADS,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "pad_token_id": 2,
}
BAICHUAN: dict[str, Any] = {
    **SIZES,
    "architectures": ["BaiChuanForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_baichuan.BaiChuanConfig"},
    "model_type": "baichuan",
    "pad_token_id": 0,
}
BAICHUAN2: dict[str, Any] = {**BAICHUAN, "architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}
CONFIGS = {"internlm2": INTERNLM2, "baichuan": BAICHUAN, "baichuan2": BAICHUAN2}
UNUSED = ["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"]
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_pieces(directory: Path, **options: Any) -> SentencePieceProcessor:
    """Write tokenizer.model, of SentencePiece's own training with the published options."""
    (directory / "text").write_text("\n".join(TEXT))
    published: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": [*UNUSED, "▁▁▁▁"],
        "vocab_size": 420,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "tokenizer"), **(published | options)
    )
    for name in ("text", "tokenizer.vocab"):
        (directory / name).unlink()
    return SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def drawn(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}


def weights_of(kind: str, rows: int) -> Tensors:
    """Return drawn weights under the published names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        if kind == "internlm2":
            packed = (HEADS + 2 * KEY_HEADS) * WIDTH
            shapes |= {
                f"{layer}.attention.wqkv.weight": (packed, HIDDEN),
                f"{layer}.attention.wqkv.bias": (packed,),
                f"{layer}.attention.wo.weight": (HIDDEN, HIDDEN),
                f"{layer}.attention.wo.bias": (HIDDEN,),
                f"{layer}.feed_forward.w1.weight": (INNER, HIDDEN),
                f"{layer}.feed_forward.w2.weight": (HIDDEN, INNER),
                f"{layer}.feed_forward.w3.weight": (INNER, HIDDEN),
                f"{layer}.attention_norm.weight": (HIDDEN,),
                f"{layer}.ffn_norm.weight": (HIDDEN,),
            }
        else:
            shapes |= {
                f"{layer}.self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
                f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
                f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
                f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
                f"{layer}.input_layernorm.weight": (HIDDEN,),
                f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            }
            if kind == "baichuan":
                shapes[f"{layer}.self_attn.rotary_emb.inv_freq"] = (WIDTH // 2,)
    ends = ("model.tok_embeddings", "output") if kind == "internlm2" else ("model.embed_tokens", "lm_head")
    shapes |= {f"{name}.weight": (rows, HIDDEN) for name in ends} | {"model.norm.weight": (HIDDEN,)}
    return drawn(shapes)


def published(directory: Path, kind: str = "internlm2", **options: Any) -> Path:
    """Write a model in a published layout, in two files with an index."""
    directory.mkdir(parents=True)
    pieces = train_pieces(directory, **options)
    config = CONFIGS[kind] | {"vocab_size": pieces.get_piece_size()}
    (directory / "config.json").write_text(json.dumps(config))
    weights = weights_of(kind, config["vocab_size"])
    names = list(weights)
    where: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if kind == "internlm2":
        start, end = (pieces.piece_to_id(piece) for piece in UNUSED)
        added = {0: "<unk>", 1: "<s>", 2: "</s>", start: "<|im_start|>", end: "<|im_end|>"}
        settings: dict[str, Any] = {
            "added_tokens_decoder": {str(number): {"content": name, "special": True} for number, name in added.items()},
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "pad_token": "</s>",
            "chat_template": CHAT,
            "tokenizer_class": "InternLM2Tokenizer",
        }
    else:
        token = {"content": "<unk>", "normalized": True, "single_word": True}
        settings = {"add_bos_token": False, "add_eos_token": False, "pad_token": token}
        settings |= {"sp_model_kwargs": {}, "tokenizer_class": "BaichuanTokenizer"}
    settings["auto_map"] = {"AutoTokenizer": ["tokenization.Class", None]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("modeling", "tokenization"):
        (directory / f"{name}.py").write_text("raise SystemExit('ran')")
    return directory


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)


def rotated(states: torch.Tensor, base: float) -> torch.Tensor:
    """Return heads × tokens × width, rotated by their positions as in GPT-NeoX."""
    steps = 1 / base ** (torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.outer(torch.arange(states.shape[1]).float(), steps).repeat(1, 2)
    first, second = states.chunk(2, -1)
    return states * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: float) -> torch.Tensor:
    """Return causal attention, tokens × hidden, of heads × tokens × width."""
    scores = rotated(queries, base) @ rotated(keys, base).transpose(1, 2) / WIDTH**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (softmax(scores.masked_fill(later, -torch.inf), -1) @ values).transpose(0, 1).flatten(1)


def of_layer(weights: Tensors, number: int, name: str) -> torch.Tensor:
    return weights[f"model.layers.{number}.{name}"]


def internlm2(weights: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """modeling_internlm2.py: rearrange(wqkv(x), "q (h gs d) -> q h gs d", gs=2 + groups); w2(silu(w1 x) · w3 x)."""
    groups = HEADS // KEY_HEADS
    states = weights["model.tok_embeddings.weight"][ids]
    for number in range(LAYERS):
        of = partial(of_layer, weights, number)
        packed = linear(
            rms(states, of("attention_norm.weight")), of("attention.wqkv.weight"), of("attention.wqkv.bias")
        ).view(len(ids), KEY_HEADS, groups + 2, WIDTH)
        queries = packed[:, :, :groups].reshape(len(ids), HEADS, WIDTH).transpose(0, 1)
        keys, values = (
            packed[:, :, each].transpose(0, 1).repeat_interleave(groups, 0) for each in (groups, groups + 1)
        )
        mixed = attended(queries, keys, values, INTERNLM2["rope_theta"])
        states = states + linear(mixed, of("attention.wo.weight"), of("attention.wo.bias"))
        normed = rms(states, of("ffn_norm.weight"))
        inner = silu(linear(normed, of("feed_forward.w1.weight"))) * linear(normed, of("feed_forward.w3.weight"))
        states = states + linear(inner, of("feed_forward.w2.weight"))
    return linear(rms(states, weights["model.norm.weight"]), weights["output.weight"])


def baichuan(weights: Tensors, ids: torch.Tensor, normalized: bool) -> torch.Tensor:
    """modeling_baichuan.py of 7B: W_pack(x).unflatten(-1, (3, hidden)); NormHead in Baichuan2."""
    states = weights["model.embed_tokens.weight"][ids]
    for number in range(LAYERS):
        of = partial(of_layer, weights, number)
        packed = linear(rms(states, of("input_layernorm.weight")), of("self_attn.W_pack.weight"))
        parts = packed.unflatten(-1, (3, HEADS, WIDTH)).permute(1, 2, 0, 3)
        queries, keys, values = parts
        states = states + linear(attended(queries, keys, values, 10000.0), of("self_attn.o_proj.weight"))
        normed = rms(states, of("post_attention_layernorm.weight"))
        inner = silu(linear(normed, of("mlp.gate_proj.weight"))) * linear(normed, of("mlp.up_proj.weight"))
        states = states + linear(inner, of("mlp.down_proj.weight"))
    head = weights["lm_head.weight"]
    return linear(rms(states, weights["model.norm.weight"]), normalize(head) if normalized else head)


def stored(directory: Path) -> Tensors:
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_published_formula(kind: str, tmp_path: Path) -> None:
    source = published(tmp_path / "source", kind)
    convert(source, tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = torch.arange(3, 43) * 7 % 400
    weights = stored(source)
    expected = internlm2(weights, ids) if kind == "internlm2" else baichuan(weights, ids, kind == "baichuan2")
    with torch.no_grad():
        actual = model(ids[None]).logits[0]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    assert {path.name for path in (tmp_path / "llama").glob("*.safetensors")} == {
        path.name for path in source.glob("*.safetensors")
    }


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["internlm2", "baichuan2"])
def test_tokens_are_those_of_sentencepiece(kind: str, prefix: bool, tmp_path: Path) -> None:
    """Special tokens divide a text, and SentencePiece encodes each part, as the published classes do."""
    symbols = UNUSED if kind == "internlm2" else None
    options: dict[str, Any] = {"user_defined_symbols": symbols or ""} if prefix else {}
    source = published(tmp_path / "source", kind, add_dummy_prefix=prefix, **options)
    convert(source, tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama", trust_remote_code=False)
    pieces = SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    first = [1] if kind == "internlm2" else []
    for text in ("Hello world,  hello\n\n    you. 你好 🐉", "    four", "x"):
        expected = pieces.encode(text)
        assert tokenizer(text).input_ids == [*first, *expected]
        assert tokenizer.decode(expected) == text
    expected = [*pieces.encode("Hello"), 2, *pieces.encode("you")]
    assert tokenizer("Hello</s>you", add_special_tokens=False).input_ids == expected
    if kind == "internlm2":
        start = pieces.piece_to_id(UNUSED[0])
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
        parts = [pieces.encode("user\nHi"), pieces.encode("\n")]
        assert rendered == [1, start, *parts[0], start + 1, *parts[1]]


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("baichuan2", "config.json", {"num_hidden_layers": 40}, "num_hidden_layers is 40, a Baichuan of 13B"),
    ("baichuan2", "config.json", {"max_position_embeddings": None}, "has no max_position_embeddings"),
    ("baichuan2", "config.json", {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ("internlm2", "config.json", {"architectures": ["InternLM2ForRewardModel"]}, "only InternLM2ForCausalLM"),
    ("internlm2", "config.json", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is .*only a type of"),
    ("internlm2", "config.json", {"logit_scale": 2}, "logit_scale is 2, a key that the published internlm2"),
    ("internlm2", "config.json", {"num_key_value_heads": 3}, "num_key_value_heads is 3; use a number that divides 4"),
    ("internlm2", "config.json", {"num_key_value_heads": 1}, r"is .*64.*; expected 1 × \(4 \+ 2\) × 8 rows"),
    ("internlm2", "config.json", {"quantization_config": {"quant_method": "awq"}}, "the weights are stored quantized"),
    ("internlm2", "config.json", {"hidden_size": "32"}, "hidden_size is '32'; "),
    ("internlm2", "config.json", {"bias": False}, "self_attn.k_proj.bias.* has no such weights"),
    ("internlm2", "tokenizer_config.json", {"sp_model_kwargs": {"alpha": 0.1}}, "sp_model_kwargs is .*; use {}"),
    ("internlm2", "tokenizer_config.json", {"additional_special_tokens": ["<x>"]}, "has '<x>', whose number"),
    ("internlm2", "special_tokens_map.json", {"eos_token": "<|im_end|>"}, "eos_token is '<|im_end|>', and '</s>'"),
]


@pytest.mark.parametrize(("kind", "name", "values", "said"), REFUSED)
def test_what_a_llama_cannot_have_is_refused(
    kind: str, name: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = published(tmp_path / "source", kind)
    if name == "special_tokens_map.json":
        edit(source / "tokenizer_config.json", **{"eos_token": "</s>"})
        (source / name).write_text("{}")
    edit(source / name, **values)
    with pytest.raises(UserError, match=said) as error:
        fetch(FetchDirectory(path=str(source), license="MIT"), tmp_path / "weights", tmp_path / "out")
    assert "\n" not in str(error.value) and str(source) in str(error.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nfkc"},
        {"model_type": "unigram"},
        {"add_dummy_prefix": True},
    ],
)
def test_tokenizer_that_would_differ_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    source = published(tmp_path / "source", "baichuan2", **options)
    with pytest.raises(UserError, match=r"tokenizer\.model: .*save the tokenizer as tokenizer\.json"):
        convert(source, tmp_path / "llama")


def test_tokenizer_json_that_the_user_supplies_is_taken(tmp_path: Path) -> None:
    source = published(tmp_path / "source")
    convert(source, tmp_path / "first")
    shutil.copyfile(tmp_path / "first/tokenizer.json", source / "tokenizer.json")
    (source / "tokenizer.model").unlink()
    convert(source, tmp_path / "llama")
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("first", "llama"))
    text = "Hello <|im_start|>you\n"
    assert one(text).input_ids == other(text).input_ids and one.chat_template == other.chat_template
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has neither tokenizer\.json nor tokenizer\.model; save the tokenizer as"):
        convert(source, tmp_path / "none")


def test_memory_is_that_of_the_llama(tmp_path: Path) -> None:
    source = published(tmp_path / "source")
    convert(source, tmp_path / "llama")
    assert read_model_spec(source) == read_model_spec(tmp_path / "llama")


def test_converted_weights_are_restored(tmp_path: Path) -> None:
    """A user's directory stays as it is; its Llama is in resources/weights."""
    source = published(tmp_path / "source")
    before = {path.name: sha256(path) for path in source.iterdir()}
    weights = tmp_path / "weights/it"
    fetch(FetchDirectory(path=str(source), license="MIT"), weights, tmp_path / "models/it")
    assert {path.name: sha256(path) for path in source.iterdir()} == before
    manifest = json.loads((tmp_path / "models/it/manifest.json").read_text())
    assert not {"modeling.py", "tokenization.py"} & ({*manifest["files"]} | {path.name for path in weights.iterdir()})
    shutil.rmtree(weights)
    restore(tmp_path / "models/it", weights)
    assert located(tmp_path / "weights/it.json") == weights
    assert {path.name for path in weights.glob("*.safetensors")} == {path.name for path in source.glob("*.safetensors")}


@pytest.mark.parametrize("writable", [True, False])
def test_model_of_the_hub_is_converted_once(writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the store; into the project where the store cannot be written. No code is downloaded."""
    source = published(tmp_path / "source", "baichuan2")
    convert(source, tmp_path / "llama")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    if not writable:
        (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / ("store" if writable else "file/store")))
    with serving(Hub({path.name: path.read_bytes() for path in source.iterdir()})) as hub:
        use(monkeypatch, hub.endpoint)
        settings = FetchHub(repository=REPOSITORY, revision=REVISION, license="Apache-2.0")
        weights, model = tmp_path / "weights/it", tmp_path / "models/it"
        fetch(settings, weights, model)
        assert not [name for name in hub.downloads() if name.endswith(".py")]
        downloads = len(hub.downloads())
        if writable:
            shutil.rmtree(weights)
            restore(model, weights)
            assert len(hub.downloads()) == downloads
            assert not list((tmp_path / "store/downloads").iterdir())
    expected = {path.name: sha256(path) for path in (tmp_path / "llama").iterdir()}
    assert {path.name: sha256(path) for path in weights.iterdir() if path.is_file()} == expected
    assert json.loads((model / "manifest.json").read_text())["source"]["revision"] == REVISION


def test_13b_is_refused_before_its_weights_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = published(tmp_path / "source", "baichuan2")
    edit(source / "config.json", num_hidden_layers=40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "store"))
    with serving(Hub({path.name: path.read_bytes() for path in source.iterdir()})) as hub:
        use(monkeypatch, hub.endpoint)
        settings = FetchHub(repository=REPOSITORY, revision=REVISION, license="Apache-2.0")
        with pytest.raises(UserError, match="a Baichuan of 13B, whose attention has ALiBi"):
            fetch(settings, tmp_path / "weights/it", tmp_path / "models/it")
        assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.slow  # the whole pipeline, of which each stage is a process
def test_pipeline_trains_and_merges_a_llama(make_project: Callable[[str], Project]) -> None:
    project = make_project("internlm2")
    shutil.rmtree(project.directory / "model")
    published(project.directory / "model")
    project.write_config()
    project.snakemake("all")
    base, merged = project.directory / "resources/weights/tiny", project.directory / "results/default/merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"
    before, after = stored(base), stored(merged)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("_proj.weight" in name for name in changed)
    first = json.loads((project.directory / "results/default/metrics/train.json").read_text())
    assert first["steps"] == 2
