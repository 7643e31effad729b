"""Every type of model that transformers maps to causal language models, through the stages, as a tiny model.

    python tests/model_matrix.py [TYPE…]     # all types, or these again; writes benchmarks/results/models.json

Each is fetched, prepared, packed, trained for two steps, merged and evaluated by this project's stages. Plain
transformers and peft say what is right: the base's loss on the training rows, the merged model's loss on the validation
rows, and the logits of the base with the adapter. Memory is that of a decoder of the type's sizes, where it has one:
benchmarks/memory/model_types.py holds the estimate of every type, whose layers take most of a tiny model's time.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
import unittest.mock
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / name)
    for name in (
        "src",
        "tests",
        "tests/slurm",
        "tests/launchers",
        "tests/train",
        "tests/workflow",
        "tests/serving",
        "benchmarks",
    )
]
RESULTS = ROOT / "benchmarks/results/models.json"
VOCABULARY = 259
"""Tokens of the tokenizer of conftest.make_tiny_model."""

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_head": 4, "n_heads": 4}
SIZES = {"hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48}
LAYERS = {"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "is_decoder": True, "d_ff": 48}
ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "word_embed_proj_dim": 32}
EXPERTS = {
    # Names of more than ten experts are in another order than their numbers.
    **{"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "expert_dim": 16},
    **{"num_experts_per_token": 2, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16},
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
STATES = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8, "mamba_n_groups": 1},
    **{"mamba_d_ssm": 64, "state_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4},
    **{"n_groups": 1, "chunk_size": 8, "lru_width": 32, "attention_hidden_size": 32, "time_step_rank": 4},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512, "n_positions": 512}
OTHERS = {"rotary_dim": 4, "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 8}
OTHERS |= {"num_kv_shared_layers": 0, "image_size": 28, "patch_size": 14, "num_kv_heads": 2}
OTHERS |= {"sliding_window": 16, "attention_chunk_size": 16, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
OTHERS |= {"shared_experts_intermediate_size": 16, "zero_expert_num": 2, "use_clipped_linears": False}
OTHERS |= {"mm_tokens_per_image": 4, "encoder_hash_byte_group_vocab": 64, "axial_pos_embds": False}
COMMON: dict[str, Any] = SIZES | HEADS | LAYERS | DECODER | ENCODER | EXPERTS | LATENT | STATES | TOKENS | OTHERS
COMMON |= {"vocab_size": VOCABULARY}
"""Keys of a tiny config, of which each type gets those that its class knows."""
KINDS = "layer_types"
BOTH = {KINDS: ["linear_attention", "full_attention"]}
OF_DRAFT: dict[str, Any] = {
    **SIZES,
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY},
    **{"num_hidden_layers": 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0},
    **{"vocab_size_per_layer_input": 0, "enable_moe_block": False, "pad_token_id": 0},
}
DRAFT = {"backbone_hidden_size": 32, "text_config": OF_DRAFT}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32}
INDEXER |= {"indexer_compress_ratio": 8}
OWN: dict[str, dict[str, Any]] = {
    "gemma4": {"audio_config": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {KINDS: ["mamba", "attention"]},
    "lfm2": {KINDS: ["conv", "full_attention"]},
    "lfm2_moe": {KINDS: ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "minimax": BOTH,
    "olmo_hybrid": BOTH,
    "qwen3_5_moe_text": BOTH,
    "qwen3_5_text": BOTH,
    "qwen3_next": BOTH,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "dots1": {"n_shared_experts": 1, "num_key_value_heads": 4},
    "zamba2": {KINDS: ["mamba", "hybrid"], "num_mem_blocks": 1, "hybrid_layer_ids": [1]},
    "zamba": {
        KINDS: ["mamba", "hybrid", "hybrid"],
        **{"num_hidden_layers": 3, "attention_hidden_size": 64, "attention_head_dim": 16},
    },
    "cohere_compass_text": {
        KINDS: ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_vision_encoder": {
        **{"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 32, "adapter_out_dim": 32},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 32},
    "dots3_note_text": {
        KINDS: ["indexed_attention", "sliding_attention"],
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8},
        **{"swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8},
    },
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "qwen4_exp_text": BOTH | INDEXER,
    "zaya": {"num_experts_per_tok": 1},
}
"""Further keys of types whose layers are of several kinds, or whose class has rules of its own."""
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo3", "granite", "smollm3", "gpt2"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4_text", "deepseek_v32", "glm_moe_dsa"),
    *("qwen3_next", "qwen3_5_text", "falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "mamba"),
)
"""What `make test` runs: what people train, and one of each kind."""
LARGEST = 30_000_000
"""Parameters of a model that a type's keys did not make tiny."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a type."""

    result: str
    """works, unpacked (with pack.packing: off alone), refused, not built, or failed."""
    said: str = ""
    """The line that refuses it, or the fault."""
    by_row: str = ""
    """The first module that is computed row by row."""
    attention: str = ""
    """The chosen implementation."""
    draws: bool = False
    """Whether its class draws at random while it trains, as some routers do, without any dropout."""


def types() -> list[str]:
    """Return every type that AutoModelForCausalLM maps, in alphabetical order."""
    from transformers import AutoModelForCausalLM

    return sorted({config.model_type for config in AutoModelForCausalLM._model_mapping})


def config_of(kind: str) -> Any:
    """Return a tiny config of a type. Raises what its class raises."""
    from transformers import CONFIG_MAPPING

    return _config(CONFIG_MAPPING[kind], OWN.get(kind, {}))


def _config(known: Any, own: dict[str, Any]) -> Any:
    """Return a config of a class, and tiny ones of its parts, with a layer of each kind that its layers have by
    default, and without dropout."""
    defaults, usual = _defaults(known), _usual(known)
    aliases = getattr(known, "attribute_map", {})
    keys = {name: value for name, value in COMMON.items() if {name, aliases.get(name)} & defaults.keys()}
    if "qk_rope_head_dim" in keys:  # latent attention, whose head_dim is that of its positions
        keys |= {name: 4 for name in ("head_dim", "num_key_value_heads") if name in keys}
    keys |= {
        name: type(value)(0)
        for name, value in defaults.items()
        if "drop" in name and type(value) in (int, float) and name not in keys
    }
    for name, part in known.sub_configs.items():
        kind: Any = part if hasattr(part, "sub_configs") else type(getattr(usual, name, None))
        if hasattr(kind, "sub_configs"):
            keys[name] = _config(kind, OWN.get(kind.model_type, {}))
    config = known(**keys | own)
    kinds = list(dict.fromkeys(getattr(usual, KINDS, None) or ()))
    if own or set(kinds) <= set(getattr(config, KINDS, None) or ()):
        return config
    count = max(2, len(kinds))
    of_kinds = {KINDS: (kinds * 2)[:count]} | {name: count for name in LAYERS if name in keys}
    try:
        return known(**keys | of_kinds)
    except Exception:  # of classes that compute the kinds themselves
        return config


def _defaults(known: Any) -> dict[str, Any]:
    """Return the arguments of a class of configs, and their defaults."""
    import inspect

    arguments = {name: each.default for name, each in inspect.signature(known.__init__).parameters.items()}
    fields = {name: each.default for name, each in getattr(known, "__dataclass_fields__", {}).items()}
    return arguments | fields


def _usual(known: Any) -> Any:
    """Return a class's config without any argument; None if it needs some."""
    try:
        return known()
    except Exception:  # of any type
        return None


def write_model(kind: str, tokenizer: Path, directory: Path) -> None:
    """Write a tiny model with drawn weights and the files of a tokenizer to `directory`.

    Raises what transformers raises, or ValueError for a model that is not tiny.
    """
    import torch

    from zerolora.model.architecture import auto_class

    config = config_of(kind)
    if config.get_text_config().vocab_size != VOCABULARY:
        config.get_text_config().vocab_size = VOCABULARY
    with torch.device("meta"):
        size = sum(each.numel() for each in auto_class(config).from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"has {size:,} parameters with the keys of a tiny model")
    torch.manual_seed(0)
    shutil.copytree(tokenizer, directory, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tokenizer / "tokenizer_config.json", directory)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for name, each in model.named_parameters():  # so that no part is without effect
            if each.dim() > 1 and "norm" not in name:
                each.normal_(0, 0.05)
    model.save_pretrained(directory)


def run(kind: str, tokenizer: Path, folder: Path) -> Outcome:
    """Take a type through the stages in a folder of its own; with its layers traced if it does not work without."""
    with _traced_if_needed():
        outcome = _run(kind, tokenizer, folder / "sizes")
    return outcome if outcome.result in ("works", "not built") else _run(kind, tokenizer, folder / "traced")


def _run(kind: str, tokenizer: Path, folder: Path) -> Outcome:
    import torch
    from bench import Bench

    from zerolora.errors import UserError

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            write_model(kind, tokenizer, folder / "model")
        except Exception as error:  # classes raise errors of many types
            return Outcome("not built", _line(error))
        try:
            bench = Bench(_made(folder / "bench"), folder / "model")
            outcome = _trained(bench, "packed")
            if outcome.result == "refused":
                unpacked = _trained(bench, "unpacked")
                outcome = outcome if unpacked.result != "works" else Outcome("unpacked", outcome.said)
        except UserError as error:
            return Outcome("refused", _line(error))
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {_line(error)}")
    return outcome


@contextlib.contextmanager
def _traced_if_needed() -> Iterator[None]:
    """Let a model's layers be traced in the block only if its memory is unknown otherwise: once with gradients and once
    without."""
    from zerolora.memory import layer_trace
    from zerolora.model.spec import fault_of_sizes

    usual, known = layer_trace._new, dict[bool, Any]()

    def new(model: Any, traced: Any) -> Any:
        if not fault_of_sizes(model):
            return "left out"
        key = traced.method is None
        if key not in known:
            known[key] = usual(model, traced)
        return known[key]

    layer_trace.layer_trace.cache_clear()
    with unittest.mock.patch.multiple(
        layer_trace,
        _new=new,
        _read=lambda _: None,
        _write=lambda *_: None,
        _faults={},
    ):
        yield
    layer_trace.layer_trace.cache_clear()


def _trained(bench: Any, packing: str) -> Outcome:
    """Train as `render` and `train` do, and check the results."""
    from zerolora.config.settings import RenderSettings
    from zerolora.data.packing_plan import open_plan
    from zerolora.data.prepared_rows import open_split
    from zerolora.planner.zero_json import ZeroJson
    from zerolora.probe.untrained import untrained

    name, rows = f"run-{packing}", len(open_plan(bench.folder / packing / "train.arrow").starts) - 1
    train = {"ranks_per_node": 1, "global_batch": rows, "max_steps": 2, "attention": "auto"}
    command = bench.command(name, "zero2", packing=packing, **train)
    zero = ZeroJson.read(bench.folder / name / "zero.json")
    settings = RenderSettings.model_validate(bench.resolved("zero2", **train)["runs"]["default"]["render"])
    left_out = untrained(settings, zero.choice.attention, bench.folder / "m/tiny")
    zero.leaving_out(left_out).write(bench.folder / name / "zero.json")
    result = bench.server.run(command, bench.folder, bench.environment)
    if result.returncode:
        refusals = re.findall(r"^zerolora: (?!rank \d)(.+)$", result.stderr, re.MULTILINE)
        return Outcome("refused", refusals[0]) if refusals else Outcome("failed", result.stderr.strip()[-300:])
    draws = _check_results(bench, bench.folder / name, open_split(bench.folder / "data", "train"))
    by_row = re.search(r"'(\S+)'.*would mix the rows of a packed row", result.stderr)
    return Outcome("works", by_row=by_row[1] if by_row else "", attention=zero.choice.attention, draws=draws)


def _check_results(bench: Any, run: Path, train: Any) -> bool:
    """Assert that the losses are those of plain transformers, and the adapter that of plain peft. Return whether the
    class draws at random while it trains, so that only the evaluated losses of two runs are equal."""
    import torch
    from bench import metrics
    from peft import PeftModel

    from zerolora.config.settings import EvaluateRunSettings
    from zerolora.data.prepared_rows import open_split
    from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
    from zerolora.merge.merge import merge
    from zerolora.model.architecture import auto_class, config_of
    from zerolora.model.manifest import located

    base, merged = located(bench.folder / "w/tiny.json"), run / "merged"
    merge(base, run / "adapter", merged, merged)
    auto = auto_class(config_of(base))
    plain = auto.from_pretrained(base, dtype=torch.float32)
    said = metrics(run)
    draws = _loss(plain, train, draw=0) != _loss(plain, train, draw=1)
    if not draws:
        _same("the first step's loss", said["losses"][0], _loss(plain, train), 1e-3)
    tuned = auto.from_pretrained(merged, dtype=torch.float32)
    _same(
        "the validation loss",
        said["loss_validation"],
        _loss(tuned, open_split(bench.folder / "data", "validation")),
        1e-3,
    )
    tokens = torch.tensor([train[0]["input_ids"]])
    with torch.no_grad():
        ours = tuned.eval()(input_ids=tokens, use_cache=False).logits
        theirs = PeftModel.from_pretrained(plain, run / "adapter").eval()(input_ids=tokens, use_cache=False).logits
    difference = float((ours - theirs).abs().max() / theirs.std())
    if not difference <= 0.01:
        raise AssertionError(f"merged logits differ from peft's by {difference:.2g} of their standard deviation")
    settings = EvaluateRunSettings(check="sum", rows=2, max_new_tokens=3)
    evaluate(settings, bench.folder / "data", EvaluatedModel(base, run / "adapter", merged), run / "e", run / "e.json")
    return draws


def _loss(model: Any, rows: Any, draw: int | None = None) -> float:
    """Return the loss of a model on rows, one at a time: as evaluated, or as trained with a seed."""
    import torch

    model.train(draw is not None)
    if draw is not None:
        torch.manual_seed(draw)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            labels = torch.tensor(row["labels"][1:])
            ids = torch.tensor([row["input_ids"]])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            tokens += int((labels != -100).sum())
    return total / tokens


def _same(what: str, ours: float, theirs: float, tolerance: float) -> None:
    if not abs(ours - theirs) <= tolerance * abs(theirs):
        raise AssertionError(f"{what} is {ours:.6g}, plain transformers' {theirs:.6g}")


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:240]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def outcomes(kinds: list[str], tokenizer: Path, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield each type's outcome, two at a time."""
    with ProcessPoolExecutor(2, initializer=_silent) as pool:
        results = pool.map(run, kinds, [tokenizer] * len(kinds), [folder / kind for kind in kinds])
        yield from zip(kinds, results, strict=True)


def _silent() -> None:
    """Let what libraries print go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)


def main(kinds: list[str]) -> None:
    """Run types, all without any, and write their outcomes beside those of others."""
    import conftest
    from measuring import machine

    before = json.loads(RESULTS.read_text())["types"] if kinds else {}
    with tempfile.TemporaryDirectory() as name:
        tokenizer = conftest.make_tiny_model(Path(name) / "tokenizer")
        for kind, outcome in outcomes(kinds or types(), tokenizer, Path(name)):
            before[kind] = {key: value for key, value in dataclasses.asdict(outcome).items() if value}
            print(kind, *(f"{key}={value}" for key, value in before[kind].items()), flush=True)
            result = {"machine": machine(), "types": dict(sorted(before.items()))}
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
