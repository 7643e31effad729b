"""What stage 3 holds gathered, by DeepSpeed's own rules; the traces of memory_traces.jsonl hold it to DeepSpeed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import compare
from zerolora.memory.gathering import Gathered, gathered
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec
from zerolora.strategies.strategy import Buckets

HIDDEN, INNER, VOCABULARY, LAYERS = 64, 256, 1000, 4
ATTENTION, MLP, EMBEDDING = HIDDEN * HIDDEN, HIDDEN * INNER, VOCABULARY * HIDDEN
EVERYTHING = 10**9


def decoder(**changed: Any) -> ModelSpec:
    """Return a small Llama, whose norms and biases are too small to be sharded."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, **sizes, **changed}
    return from_config(config, Path("config.json"))


def held(
    model: ModelSpec, checkpointing: bool = True, together: bool = True, head: bool = False, **sizes: Any
) -> Gathered:
    buckets = replace(Buckets(persistence=HIDDEN), **sizes)
    return gathered(model, (("", 1),), buckets, checkpointing, head, together)


def most(each: Gathered) -> int:
    return max(*(size for _, _, size in each.forward), each.loss, each.backward, each.before_last, each.backward_end)


def test_without_prefetching_one_module_is_held_at_a_time() -> None:
    model = decoder()
    norms = (2 * LAYERS + 1) * HIDDEN  # stay gathered
    actual = held(model)
    by_module = {path.rpartition(".")[2]: size - norms for path, _, size in actual.forward}
    assert by_module.pop("") == EMBEDDING
    assert by_module == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ATTENTION) | {
        "gate_proj": MLP,
        "up_proj": MLP,
        "down_proj": EMBEDDING,  # then the head arrives
    }
    assert actual.loss == EMBEDDING + norms
    assert actual.before_last == MLP + norms


def test_a_bucket_is_held_twice_until_its_last_weight_is_used() -> None:
    """While a projection of a layer is used, those that follow lie in their buffer and as copies."""
    model = decoder()
    layer = 4 * ATTENTION + 3 * MLP
    actual, alone = (held(model, prefetch=layer, live=2 * layer, together=each) for each in (True, False))
    assert actual.before_last == alone.before_last + 3 * MLP


def test_all_experts_of_a_layer_arrive_at_once() -> None:
    """With room for a single weight, both parameters of a layer's experts are there, in their buffer and as copies."""
    text = (compare.OWN_MODELS / "mixtral-8x22b.json").read_text(encoding="utf-8")
    model = from_config(json.loads(text) | {"num_hidden_layers": 3}, Path("config.json"))
    experts = next(module.parameters for module in model.modules if module.kind == "experts")
    for together in (True, False):
        actual = held(model, together=together, persistence=0)
        assert actual.backward_end == experts * (1 + together)


def test_a_fused_loss_keeps_the_head_for_the_whole_step() -> None:
    plain, fused = held(decoder()), held(decoder(), head=True)
    assert fused.backward_end == plain.backward_end + EMBEDDING
    # In a tied model that is the embedding, which is then gathered once.
    tied = held(decoder(tie_word_embeddings=True), head=True)
    assert tied.backward_end == plain.before_last + EMBEDDING


@given(st.booleans(), st.booleans(), st.integers(0, 2 * MLP), st.integers(0, 20 * MLP), st.booleans())
def test_no_more_is_held_than_everything_twice(
    checkpointing: bool, tied: bool, prefetch: int, live: int, head: bool
) -> None:
    model = decoder(tie_word_embeddings=tied)
    adapters = sum(module.inputs + module.outputs for module in model.linears)
    actual = held(model, checkpointing, prefetch=prefetch, live=live, head=head)
    assert EMBEDDING <= most(actual) <= 2 * (model.parameters + adapters)
    # Beyond the limit are a bucket, its last weight, a module, and the buffers of as much.
    assert most(actual) <= 2 * (live + prefetch + 2 * EMBEDDING) + (2 * LAYERS + 1) * HIDDEN + head * EMBEDDING


def traces_of_mixtures() -> list[dict[str, Any]]:
    stage_3 = [trace for trace in compare.read_traces() if trace["case"]["strategy"] == "zero3"]
    return [trace for trace in stage_3 if compare.model_of(trace["case"]).experts]


def test_mixtures_of_experts_at_stage_3_are_those_of_a_trace() -> None:
    """Experts are most of such a model: a layer of them more or less gathered is a tenth of the total."""
    actual = [compare.compared(trace["case"], trace["bytes"])["error"] for trace in traces_of_mixtures()]
    assert len(actual) >= 7
    assert sum(map(abs, actual)) / len(actual) < 0.02
    assert -0.02 < min(actual) <= max(actual) < 0.08


def test_experts_that_are_not_adapted_stay_after_their_use_until_the_backward_pass() -> None:
    """Views of their weights are saved; of adapted ones the sum with the adapter is. Checkpointing saves neither."""
    text = (compare.OWN_MODELS / "mixtral-8x22b.json").read_text(encoding="utf-8")
    model = from_config(json.loads(text) | {"num_hidden_layers": 6}, Path("config.json"))
    experts = next(module for module in model.modules if module.kind == "experts")
    adapted = tuple((f"{experts.path}.{name}", 1) for name, _ in experts.weights)
    buckets = Buckets()
    kept, summed, again = (
        gathered(model, ranks, buckets, checkpointing, False, True).loss
        for ranks, checkpointing in (((("", 1),), False), (adapted, False), ((("", 1),), True))
    )
    assert kept == again + 6 * experts.parameters
    assert summed == again
