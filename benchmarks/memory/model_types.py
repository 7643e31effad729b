"""Hold the estimate of every model type against a trace of its whole class, forward, backward and optimizer step.

    .venv/bin/python benchmarks/memory/model_types.py                      # all types without a result
    .venv/bin/python benchmarks/memory/model_types.py qwen3_5_text mamba   # these again

A small random config of each type is estimated and traced (trace.py) with LoRA, in rows of other sizes than those from
which memory/traced_parts.py extrapolates, with and without activation checkpointing. Writes
benchmarks/results/memory_types.json after each type, and the table of docs/memory.md at the end.
"""

import fcntl
import json
import logging
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memory.trace as whole
from measuring import RESULTS, machine, parser_of, put, table
from memory.compare import errors, spec_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zerolora.files import write_json
from zerolora.memory.layer_trace import fault_of_tracing
from zerolora.memory.predict import predict
from zerolora.model.foreign import reason
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec

SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8},
    **{"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096},
}
GROUPED = {"num_key_value_heads": 4, "head_dim": 32}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 160, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 64, "num_key_value_heads": 8, "head_dim": 16}
STATES = {"mamba_num_heads": 16, "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_head_dim": 32, "n_mamba_heads": 16}
STATES |= {"linear_num_value_heads": 8, "linear_num_key_heads": 8, "linear_key_head_dim": 32}
STATES |= {"linear_value_head_dim": 32, "lru_width": 256, "state_size": 16}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    SIZES | GROUPED | EXPERTS | STATES,
    SIZES | LATENT | EXPERTS,
    SIZES | GROUPED | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512},
    SIZES | {"num_attention_heads": 16, "num_heads": 16, "head_dim": 32, "n_groups": 1, "state_size": 32},
    SIZES | LATENT,
    SIZES | GROUPED | EXPERTS,
    SIZES | GROUPED,
    SIZES | EXPERTS,
    SIZES,
)
"""Sizes, of which the first is taken that a type's class accepts."""
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {"layer_types": ["conv", "full_attention"] * 4, "num_dense_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROTARY),
    },
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "gptj": {"rotary_dim": 16},
    "jetmoe": {"num_key_value_heads": 4, "kv_channels": 32},
    "lfm2_moe": KINDS,
    "longcat_flash": {"head_dim": 16, "qk_rope_head_dim": 16},
    "mamba2": {"num_heads": 16, "head_dim": 32},
}
"""Sizes that a type needs beside these."""
BATCHES = (
    {"micro_batch": 2, "length": 640, "checkpointing": False, "loss": "fused"},
    {"micro_batch": 1, "length": 1536, "checkpointing": True, "loss": "plain"},
)
BY_TOKEN = ("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "xlstm", "zamba")
"""Types that compute token by token, whose traces of long rows take minutes."""
SHORT = ({"length": 160}, {"length": 200})
"""Their rows."""
IN_FP32 = ("xlstm",)
"""Types whose class computes long rows in fp32 alone."""
SECONDS = 240
"""The most that a type may take."""
PATH = RESULTS / "memory_types.json"
CASE = {"model": "", "method": "lora", "strategy": "ddp", "ranks": 1, "logits": 0, "r": 8, "precision": "bf16"}
CASE |= {"dropout": 0.0}


def main() -> None:
    """Estimate, trace, compare and write."""
    parser = parser_of(__doc__)
    parser.add_argument("types", nargs="*", help="model types, traced again; by default those without a result")
    parser.add_argument("--print", action="store_true", help="print only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    whole.join_fake_ranks(1)
    whole.compute_as_cuda_does()
    names = options.types or [name for name in decoders() if name not in recorded()]
    for name in names:
        try:
            with limited(SECONDS):
                result: list[dict[str, Any]] | str = compared(name)
        except (Exception, TooLong) as error:  # configs and classes raise errors of any type
            result = reason(error)
            print(f"{name}: {result}", flush=True)
        if not options.print:
            record(name, result)
    if not options.print:
        content = json.loads(PATH.read_text(encoding="utf-8"))
        put("memory.md", "errors of the estimate by type", markdown(content))


def recorded() -> set[str]:
    """Return the types with a result."""
    content = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"rows": [], "refused": {}}
    return {row["type"] for row in content["rows"]} | set(content["refused"])


def record(name: str, result: list[dict[str, Any]] | str) -> None:
    """Write a type's rows, or why it has none, beside those of others, which other processes may write."""
    with (Path(tempfile.gettempdir()) / "zerolora-memory-types.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"rows": [], "refused": {}}
        rows = [row for row in content["rows"] if row["type"] != name]
        refused = {type_: why for type_, why in content["refused"].items() if type_ != name}
        if isinstance(result, str):
            refused[name] = result
        else:
            rows = sorted([*rows, *result], key=lambda row: str(row["type"]))
        kinds = sorted({row["by"] for row in rows})
        summary = {kind: errors([row for row in rows if row["by"] == kind]) for kind in kinds}
        write_json(PATH, {"machine": machine(), **summary, "rows": rows, "refused": refused})


class TooLong(BaseException):
    """A type takes too long; no error that tracing takes for one of the model's class."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TooLong after some seconds."""

    def stop(*_: object) -> None:
        raise TooLong(f"takes more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def decoders() -> list[str]:
    """Return the types of language models: no encoders, and no models with towers, whose language models have types of
    their own."""
    encoders = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return sorted(
        name
        for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in encoders and not CONFIG_MAPPING[name].sub_configs
    )


def compared(name: str) -> list[dict[str, Any]]:
    """Return predicted and traced bytes of a type's batches, with the first sizes of ATTEMPTS with which its class
    computes. Raises the last error if there are none."""
    factory = CONFIG_MAPPING[name]
    failed: Exception | None = None
    for attempt in ATTEMPTS:
        sizes = attempt | OWN.get(name, {})
        try:
            parts = {part: sizes for part in factory.sub_configs if part in ("text_config", "llm_config")}
            config: dict[str, Any] = json.loads(factory(**(parts or sizes)).to_json_string(use_diff=False))
            model = from_config(config, Path(name))
            assert model.hidden == SIZES["hidden_size"], f"a hidden size of {model.hidden}"
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "config.json"
                path.write_text(json.dumps(config), encoding="utf-8")
                return rows_of(name, model, str(path))
        except Exception as error:  # config and model classes raise errors of any type
            failed = error
    assert failed
    raise failed


def rows_of(name: str, model: ModelSpec, config: str) -> list[dict[str, Any]]:
    """Return predicted and traced bytes of each batch."""
    attention = "sdpa" if "sdpa" in model.attentions else "eager"
    rows = []
    for batch, short in zip(BATCHES, SHORT, strict=True):
        case = CASE | batch | {"attention": attention, "config": config}
        case |= short if name in BY_TOKEN else {}
        case |= {"precision": "fp32"} if name in IN_FP32 else {}
        try:
            traced = traced_step(whole.Case(**whole.DEFAULTS | case))
        except ValueError as error:
            if case["checkpointing"] and "does not support activation checkpointing" in str(error):
                continue
            raise
        phases = predict(model, spec_of({**case, "loss": "fused" if case["loss"] == "fused" else "full"})).phases
        predicted = max(phases[phase] for phase in ("forward", "loss", "backward", "backward_end", "optimizer"))
        if why := fault_of_tracing(model):
            raise ValueError(f"counted as a decoder of its sizes, {predicted / traced - 1:+.0%}: {why}")
        by = "trace" if model.config else "table"
        row = {"type": name, "by": by, **{key: case[key] for key in ("micro_batch", "length", "checkpointing", "loss")}}
        rows.append(row | {"predicted": predicted, "traced": traced, "error": predicted / traced - 1})
        print(f"{name:24} {by:6} {predicted / traced - 1:+7.2%} {traced / 2**20:8.1f} MiB", flush=True)
    return rows


def traced_step(case: whole.Case) -> int:
    """Return the peak bytes of an optimizer step."""
    model = whole.on_meta(case)
    live = whole.Live()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        whole.materialize(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = whole.built("adamw", trained)
        engine = whole.with_engine(model, optimizer, case)
        peaks = []
        for _ in range(whole.STEPS):
            live.restart()
            peaks.append(whole.one_step(engine, optimizer, live, case)["peak"])
    return peaks[-1]


def markdown(content: dict[str, Any]) -> str:
    """Return the table of docs/memory.md."""
    by = {"table": "tables", "trace": "traced layers"}
    lines = [
        (
            by[kind],
            len({row["type"] for row in content["rows"] if row["by"] == kind}),
            f"{content[kind]['mean_absolute_error']:.2%}",
            f"{content[kind]['worst_error']:+.1%}",
            f"{content[kind]['lowest_error']:+.1%}",
        )
        for kind in by
        if kind in content
    ]
    return table(["estimated by", "types", "mean error", "worst", "lowest"], lines)


if __name__ == "__main__":
    main()
