"""Gathered weights at stage 3, by DeepSpeed's rules and against the traces of memory_traces.jsonl."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import compare
from zerolora.memory.gathering import Gathered, gathered
from zerolora.methods.lora import LoraMethod
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec
from zerolora.strategies.strategy import Buckets

HIDDEN, INNER, VOCABULARY, LAYERS = 64, 256, 1000, 4
ATTENTION, MLP, EMBEDDING = HIDDEN * HIDDEN, HIDDEN * INNER, VOCABULARY * HIDDEN
EVERYTHING = 10**9


def decoder(**changed: Any) -> ModelSpec:
    """Return a small Llama whose norms and biases are too small to be sharded."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, **sizes, **changed}
    return from_config(config, Path("config.json"))


def gathers(
    model: ModelSpec, checkpointing: bool = True, together: bool = True, head: bool = False, **sizes: Any
) -> Gathered:
    buckets = replace(Buckets(persistence=HIDDEN), **sizes)
    return gathered(model, (("", 1),), buckets, checkpointing, head, together, LoraMethod(), 2)


def most(each: Gathered) -> int:
    return max(*(size for _, _, size in each.forward), each.loss, each.backward, each.before_last, each.backward_end)


def test_without_prefetching_one_module_is_gathered_at_a_time() -> None:
    model = decoder()
    norms = (2 * LAYERS + 1) * HIDDEN  # stay gathered
    actual = gathers(model)
    by_module = {path.rpartition(".")[2]: size - norms for path, _, size in actual.forward}
    assert by_module.pop("") == EMBEDDING
    assert by_module == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ATTENTION) | {
        "gate_proj": MLP,
        "up_proj": MLP,
        "down_proj": EMBEDDING,  # then the head is gathered
    }
    assert actual.loss == EMBEDDING + norms
    assert actual.before_last == MLP + norms


def test_bucket_exists_twice_until_its_last_weight_is_used() -> None:
    """While a projection is used, the following ones exist as a buffer and as copies."""
    model = decoder()
    layer = 4 * ATTENTION + 3 * MLP
    actual, alone = (gathers(model, prefetch=layer, live=2 * layer, together=each) for each in (True, False))
    assert actual.before_last == alone.before_last + 3 * MLP


def test_all_experts_of_a_layer_are_gathered_at_once() -> None:
    text = (compare.OWN_MODELS / "mixtral-8x22b.json").read_text(encoding="utf-8")
    model = from_config(json.loads(text) | {"num_hidden_layers": 3}, Path("config.json"))
    experts = next(module.parameters for module in model.modules if module.kind == "experts")
    for together in (True, False):
        actual = gathers(model, together=together, persistence=0)
        assert actual.backward_end == experts * (1 + together)


def test_fused_loss_gathers_the_head_for_the_whole_step() -> None:
    plain, fused = gathers(decoder()), gathers(decoder(), head=True)
    assert fused.backward_end == plain.backward_end + EMBEDDING
    # A tied model gathers its embedding once.
    tied = gathers(decoder(tie_word_embeddings=True), head=True)
    assert tied.backward_end == plain.before_last + EMBEDDING


@given(st.booleans(), st.booleans(), st.integers(0, 2 * MLP), st.integers(0, 20 * MLP), st.booleans())
def test_gathered_weights_are_bounded(checkpointing: bool, tied: bool, prefetch: int, live: int, head: bool) -> None:
    model = decoder(tie_word_embeddings=tied)
    adapters = sum(module.inputs + module.outputs for module in model.linears)
    actual = gathers(model, checkpointing, prefetch=prefetch, live=live, head=head)
    assert EMBEDDING <= most(actual) <= 2 * (model.parameters + adapters)
    # The limit is exceeded by a bucket, its last weight, a module, and buffers of the same size.
    assert most(actual) <= 2 * (live + prefetch + 2 * EMBEDDING) + (2 * LAYERS + 1) * HIDDEN + head * EMBEDDING


def traces_of_mixtures() -> list[dict[str, Any]]:
    stage_3 = [trace for trace in compare.read_traces() if trace["case"]["strategy"] == "zero3"]
    return [trace for trace in stage_3 if compare.model_of(trace["case"]).experts]


def test_mixtures_of_experts_match_their_traces() -> None:
    """One layer of experts more or less is a tenth of the total."""
    actual = [compare.compared(trace["case"], trace["bytes"])["error"] for trace in traces_of_mixtures()]
    assert len(actual) >= 7
    assert sum(map(abs, actual)) / len(actual) < 0.02
    assert -0.02 < min(actual) <= max(actual) < 0.08


def test_unadapted_experts_stay_gathered_until_backward() -> None:
    """Autograd saves views of their weights; for adapted experts it saves sums; with checkpointing, neither."""
    text = (compare.OWN_MODELS / "mixtral-8x22b.json").read_text(encoding="utf-8")
    model = from_config(json.loads(text) | {"num_hidden_layers": 6}, Path("config.json"))
    experts = next(module for module in model.modules if module.kind == "experts")
    adapted = tuple((f"{experts.path}.{name}", 1) for name, _ in experts.weights)
    buckets = Buckets()
    views, sums, neither = (
        gathered(model, ranks, buckets, checkpointing, False, True, LoraMethod(), 2).loss
        for ranks, checkpointing in (((("", 1),), False), (adapted, False), ((("", 1),), True))
    )
    assert views == neither + 6 * experts.parameters
    assert sums == neither
