"""The cost model: closed formulas, properties of any model and machine, and a published experiment."""

from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from zerolora.memory.training_spec import RowStatistics, TrainingSpec
from zerolora.methods.registry import create
from zerolora.model.read_spec import read_model_spec
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.candidates import step_work
from zerolora.planner.cost import step_seconds, useful_flops
from zerolora.planner.hardware import GPUS, Disk, HardwareRates, Link, named
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import StepWork
from zerolora.train.objectives import OBJECTIVES

# Llama-3-8B, LoRA r 16 on all linear modules: 32 layers, 4096 wide, 8 key-value heads of 32, MLP 14336.
PSI, PHI = 8_030_261_248, 41_943_040
LLAMA = StepWork(
    length=4096,
    micro_batch=1,
    accumulation=4,
    frozen=PSI,
    trainable=PHI,
    matmul=7_504_658_432,
    modules=225,
    layers=32,
    hidden=4096,
    heads=32,
    head_dim=128,
    vocabulary=128_256,
    attended=4096,
    supervised=1.0,
    checkpointing=True,
    attention="sdpa",
    width=2,
)
ZERO3 = STRATEGIES["zero3"]
MODELS = ROOT / "config/recipes/models"
NODE = named("H100-SXM", "nvlink4", "infiniband-ndr", "bf16", ranks_per_node=8, adapters=8)
FOUR_NODES = named("H100-SXM", "nvlink4", "100gbe", "bf16", ranks_per_node=8, nodes=4)

# Qwen2.5-14B, LoRA r 8, 16 rows of 64 tokens a GPU, of which 20 are the answer's.
REFERENCE = StepWork(
    length=64,
    micro_batch=16,
    accumulation=1,
    frozen=14_770_033_664,
    trainable=34_406_400,
    matmul=13_989_052_416,
    modules=337,
    layers=48,
    hidden=5120,
    heads=40,
    head_dim=128,
    vocabulary=152_064,
    attended=64,
    supervised=20 / 64,
    checkpointing=True,
    attention="sdpa",
    width=2,
)

rates = st.floats(1e9, 1e15)
bandwidths = st.floats(1e6, 1e13)


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    """Draw a transformer, from a toy to 100B parameters."""
    hidden, layers = draw(st.integers(64, 16384)), draw(st.integers(1, 100))
    vocabulary = draw(st.integers(256, 200_000))
    body, head = 12 * layers * hidden * hidden, vocabulary * hidden
    lora = draw(st.booleans())
    length = draw(st.integers(1, 16384))
    return StepWork(
        length=length,
        micro_batch=draw(st.integers(1, 32)),
        accumulation=draw(st.integers(1, 16)),
        frozen=body + 2 * head if lora else 0,
        trainable=draw(st.integers(1, body // 8 + 1)) if lora else body + 2 * head,
        matmul=body + head,
        modules=7 * layers + 1,
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // 64),
        head_dim=64,
        vocabulary=vocabulary,
        attended=draw(st.floats(0.5, length)),
        supervised=draw(st.floats(0, 1)),
        checkpointing=draw(st.booleans()),
        attention=draw(st.sampled_from(["eager", "sdpa", "flash"])),
        width=draw(st.sampled_from([2, 4])),
        key_heads=max(1, hidden // 256),
        sequence_parallel=draw(st.sampled_from([1, 1, 2, 8])),
    )


@st.composite
def machines(draw: st.DrawFn, least_nodes: int = 1) -> HardwareRates:
    """Draw a cluster; a network is never faster than the links inside a node."""
    node = Link("node", draw(bandwidths), draw(st.floats(0, 1e-3)))
    network = Link("network", node.bandwidth * draw(st.floats(1e-3, 1)), node.latency + draw(st.floats(0, 1e-3)))
    return HardwareRates(
        name="drawn",
        rate=draw(rates),
        memory_bandwidth=draw(bandwidths),
        node=node,
        network=network,
        host=Link("host", draw(bandwidths), draw(st.floats(0, 1e-3))),
        disk=Disk("disk", draw(bandwidths), draw(bandwidths)),
        host_adamw=draw(st.floats(1e6, 1e11)),
        kernel_seconds=draw(st.floats(0, 1e-4)),
        ranks_per_node=draw(st.integers(1, 16)),
        nodes=draw(st.integers(least_nodes, 64)),
        cpu=draw(st.booleans()),
    )


names = st.sampled_from(sorted(STRATEGIES))


def total(work: StepWork, name: str, hardware: HardwareRates) -> float:
    return step_seconds(work, STRATEGIES[name], hardware).total


def moved(work: StepWork, name: str, hardware: HardwareRates) -> dict[str, float]:
    """Return the bytes a rank sends in a step."""
    return step_seconds(work, STRATEGIES[name], hardware).moved


# Closed formulas


def test_stages_0_to_2_send_the_adapter_only() -> None:
    """2φ to all-reduce, φ more to gather updated shards; stage 2 reduces in each of the four micro-steps."""
    ring = 7 / 8 * 2  # (n-1)/n, two bytes
    assert moved(LLAMA, "zero0", NODE) == pytest.approx({"all_reduce gradients": 2 * PHI * ring})
    assert sum(moved(LLAMA, "zero1", NODE).values()) == pytest.approx((2 + 1) * PHI * ring)
    assert sum(moved(LLAMA, "zero2", NODE).values()) == pytest.approx((4 * 2 + 1) * PHI * ring)
    assert sum(moved(LLAMA, "ddp", NODE).values()) == pytest.approx(2 * PHI * ring * 2)  # fp32


def test_stage_3_gathers_the_model_twice_a_micro_step_except_live_weights() -> None:
    sent = moved(LLAMA, "zero3", NODE)
    assert sent["all_gather weights"] == pytest.approx(4 * (2 * (PSI + PHI) - 1e9) * 2 * 7 / 8)
    assert sent["reduce_scatter gradients"] == pytest.approx(4 * PHI * 2 * 7 / 8)
    assert 1.8 * PSI < ZERO3.gathered(LLAMA) / 4 < 3 * PSI  # of 2 to 3 Ψ
    assert moved(LLAMA, "zero3_quantized", NODE)["all_gather weights"] == sent["all_gather weights"] / 2
    head = 2 * 128_256 * 4096
    assert moved(replace(LLAMA, outside=head), "fsdp", NODE)["all_gather weights"] == pytest.approx(
        4 * (2 * (PSI + PHI) - head) * 2 * 7 / 8
    )


def test_quantized_gradients_are_four_bits_in_a_node_and_their_sums_between_nodes() -> None:
    """With all weights trained, whose rows are long, the scales are little; with LoRA they are as much as the rest."""
    full = replace(LLAMA, frozen=0, trainable=PSI)
    sent, plain = (moved(full, name, FOUR_NODES) for name in ("zero3_qgz", "zero3"))
    scales = 4 / full.hidden
    assert sent["all_to_all gradients in a node"] == pytest.approx(4 * PSI * (0.5 + scales) * 7 / 8)
    assert sent["all_to_all gradients between nodes"] == pytest.approx(4 * PSI * (0.5 + scales) / 8 * 3 / 4)
    assert sent["all_gather weights"] == plain["all_gather weights"]
    assert "reduce_scatter gradients" not in sent
    lora = moved(LLAMA, "zero3_qgz", FOUR_NODES)
    rows = 2 * LLAMA.modules * LLAMA.hidden
    assert lora["all_to_all gradients in a node"] == pytest.approx(4 * (PHI / 2 + 4 * rows) * 7 / 8)
    times = [step_seconds(full, STRATEGIES[name], FOUR_NODES).communication_network for name in ("zero3_qgz", "zero3")]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("live", "checkpointing", "counted"),
    [
        # Elements that DeepSpeed 0.19.8 gathered in a micro-step of an 8-layer Llama with adapters, on two ranks.
        (250_000, False, 1.851),
        (250_000, True, 1.931),
        (100_000, False, 1.948),
        (100_000, True, 2.099),
        (20_000, False, 2.017),
        (20_000, True, 2.145),
        (1_000_000_000, True, 1.237),
    ],
)
def test_gathered_elements_match_those_counted_in_deepspeed(live: int, checkpointing: bool, counted: float) -> None:
    work = replace(LLAMA, accumulation=1, frozen=1_443_968, trainable=69_632, live=live, checkpointing=checkpointing)
    assert ZERO3.gathered(work) / work.frozen == pytest.approx(counted, rel=0.16)


def test_between_nodes_hpz_sends_the_trained_weights_and_gradients_only() -> None:
    """The secondary shard of a trained weight is stale after each step; a frozen weight's never is."""
    sent = moved(LLAMA, "zero3_hpz", FOUR_NODES)
    assert sent["all_gather weights"] == pytest.approx(PHI * 2 * 31 / 32)
    gathered = ZERO3.gathered(LLAMA) - PHI
    assert sent["all_gather weights in a node"] == pytest.approx(gathered * 2 * 7 / 8)
    assert sent["reduce_scatter gradients"] == pytest.approx(4 * PHI * 2 * 31 / 32)


def test_hybrid_fsdp_reduces_a_ranks_shard_across_nodes() -> None:
    sent = moved(LLAMA, "fsdp_hybrid", FOUR_NODES)
    assert sent["all_gather weights"] == pytest.approx(4 * 2 * (PSI + PHI) * 2 * 7 / 8)
    assert sent["reduce_scatter gradients"] == pytest.approx(PHI * 4 * 7 / 8)
    assert sent["all_reduce gradients"] == pytest.approx(PHI / 8 * 4 * 2 * 3 / 4)


def test_forward_and_backward_follow_the_closed_formulas() -> None:
    """With free memory access: 2P and 2P a token, adapters 2 and 4 φ, attention 4·s·h and 10·s·h."""
    machine = replace(NODE, rate=1.0, memory_bandwidth=1e30, kernel_seconds=0.0)
    cost = step_seconds(LLAMA, STRATEGIES["zero2"], machine)
    tokens, attention = 4 * 4096, 4 * 4096 * 4096 * 32
    assert cost.forward == pytest.approx(tokens * (2 * 7_504_658_432 + 2 * PHI + attention))
    assert cost.backward == pytest.approx(tokens * (2 * 7_504_658_432 + 4 * PHI + 2.5 * attention))
    assert cost.recompute == pytest.approx(cost.forward - tokens * 2 * 128_256 * 4096)
    full = replace(LLAMA, frozen=0, trainable=PSI)
    whole = step_seconds(full, STRATEGIES["zero2"], machine)
    assert whole.backward == pytest.approx(tokens * (4 * 7_504_658_432 + 2.5 * attention))


def work_of(name: str, *, of_rows: dict[str, Any] | None = None, **changed: Any) -> StepWork:
    """Return a step on one row of 4,096 tokens with a model of the recipes; `of_rows` changes the data's statistics."""
    model = read_model_spec(MODELS / f"{name}.json")
    spec = TrainingSpec(
        strategy="zero3",
        method=create("lora", r=16),
        nodes=1,
        ranks_per_node=8,
        micro_batch=1,
        accumulation=1,
        length=4096,
        activation_checkpointing=False,
        attention="sdpa",
        precision="bf16",
    )
    rows = RowStatistics(
        packing=True,
        longest_packed_row=4096,
        most_supervised=4096,
        packed_rows=1,
        tokens=4096,
        supervised_tokens=4096,
        mean_row_of_a_token=4096.0,
        validation_rows=0,
    )
    return step_work(model, replace(spec, **changed), replace(rows, **(of_rows or {})))


def test_a_common_prefix_is_computed_once() -> None:
    """Four rows of 4,096 tokens that begin with the same 1,000: products of 3,000 tokens and their scores are saved."""
    machine = replace(NODE, rate=1.0, memory_bandwidth=1e30, kernel_seconds=0.0)
    settings: dict[str, Any] = {"micro_batch": 4, "attention": "flash"}
    alike = {"common_prefix": 1000, "rows": 1}
    plain, once = (work_of("llama-3-8b", **settings, of_rows=rows) for rows in (None, alike))
    assert (plain.prefix, once.prefix, once.saved) == (0, 1000, 3000)
    products = 2 * (once.matmul - once.vocabulary * once.hidden + once.trainable)
    scores = 4 * 1000 / 2 * once.heads * once.head_dim * once.layers
    forward, backward = (
        step_seconds(plain, ZERO3, machine).terms[name] - step_seconds(once, ZERO3, machine).terms[name]
        for name in ("forward", "backward")
    )
    assert forward == pytest.approx(3000 * (products + scores), rel=1e-6)
    assert backward > 3000 * products
    assert useful_flops(plain) == useful_flops(once)


@pytest.mark.parametrize(
    ("changed", "of_rows"),
    [
        ({"attention": "sdpa"}, {}),
        ({"micro_batch": 1}, {}),
        ({"sequence_parallel": 2}, {}),
        ({"method": create("lora", dropout=0.05)}, {}),
        ({}, {"common_prefix": 7}),
        ({}, {"common_prefix": 300}),  # of 4 x 4,096 tokens: less than a sixteenth
    ],
)
def test_a_prefix_that_training_does_not_share_is_not_counted(changed: dict[str, Any], of_rows: dict[str, Any]) -> None:
    settings = {"micro_batch": 4, "attention": "flash", **changed}
    assert work_of("llama-3-8b", **settings, of_rows={"common_prefix": 1000, "rows": 1, **of_rows}).prefix == 0


def test_rows_of_a_packed_row_share_a_prefix_too() -> None:
    rows: dict[str, Any] = {"common_prefix": 100, "rows": 8}
    work = work_of("llama-3-8b", micro_batch=2, attention="flash", of_rows=rows)
    assert (work.saved, work.computed) == (100 * 15, 2 * 4096 - 1500)


def test_the_prompt_of_a_pair_is_computed_once() -> None:
    """Two pairs in a packed row, each with a prompt of 800 tokens."""
    machine = replace(NODE, rate=1.0, memory_bandwidth=1e30, kernel_seconds=0.0)
    settings: dict[str, Any] = {"micro_batch": 3, "attention": "flash", "objective": OBJECTIVES["dpo"]}
    alike = {"rows": 2, "shared_prompts": 1600, "shared_prompt_of_a_token": 800.0}
    plain, once = (work_of("llama-3-8b", **settings, of_rows=rows) for rows in ({"rows": 2}, alike))
    assert (plain.saved, once.saved, once.computed) == (0, 4800, 3 * 4096 - 4800)
    products = 2 * (once.matmul - once.vocabulary * once.hidden + once.trainable)
    scores = 4 * 800 / 2 * once.heads * once.head_dim * once.layers
    saved = step_seconds(plain, ZERO3, machine).forward - step_seconds(once, ZERO3, machine).forward
    assert saved == pytest.approx(4800 * (products + scores), rel=1e-6)
    # A prefix of all four sequences saves more if it is nearly as long.
    of_all = work_of("llama-3-8b", **settings, of_rows=alike | {"common_prefix": 700})
    assert (of_all.saved, of_all.saved_scores) == (700 * 11, 700 * 11 * 350)
    assert work_of("llama-3-8b", **settings | {"attention": "sdpa"}, of_rows=alike).saved == 0


def test_offloaded_checkpoints_cross_the_host_link_twice() -> None:
    """Llama-3-8B: 32 layers' inputs of 4,096 tokens x 4,096 x 2 bytes, there and back, in each of 4 micro-batches. What
    is computed meanwhile hides all but the last one's way."""
    settings: dict[str, Any] = {"activation_checkpointing": True, "accumulation": 4}
    plain, offload = (work_of("llama-3-8b", activation_offload=each, **settings) for each in (False, True))
    machine = replace(NODE, host=Link("pcie", 1e9, 1e-3))
    without, moved = (step_seconds(each, ZERO3, machine) for each in (plain, offload))
    assert without.offload == 0
    one = 4096 * 4096 * 2 / 1e9 + 1e-3
    computed = [without.forward, without.backward + without.recompute]
    assert moved.offload == pytest.approx(sum(max(4 * one, 4 * 32 * one - seconds) for seconds in computed))
    assert moved.offload > 2 * 4 * one
    fast = replace(NODE, host=Link("pcie", 1e12, 0.0))
    assert step_seconds(offload, ZERO3, fast).offload == pytest.approx(2 * 4 * 4096 * 4096 * 2 / 1e12)
    assert replace(moved, offload=0.0) == without
    assert work_of("llama-3-8b", activation_offload=True, on_cpu=True, **settings).offloads_inputs is False


def test_a_token_computes_only_with_its_experts() -> None:
    """Mixtral 8x7B computes with 2 of 8 experts, but gathers and reads all of them."""
    machine = replace(NODE, rate=1.0, memory_bandwidth=1e30, kernel_seconds=0.0)
    attention_only = create("lora", targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    work = work_of("mixtral-8x7b", method=attention_only)
    cost = step_seconds(work, ZERO3, machine)
    active = 12_879_925_248 - 32_000 * 4096  # without the embedding, a lookup
    routers_and_norms = 32 * 8 * 4096 + 65 * 4096
    products = 2 * (active - routers_and_norms + work.trainable) + 4 * 4096 * 4096 * 32
    assert cost.forward == pytest.approx(4096 * products, rel=1e-3)
    assert useful_flops(work)["token"] < 4 * 12_879_925_248 + 6 * work.trainable
    assert ZERO3.gathered(work) > 1.8 * 46_702_792_704
    slow_memory = replace(NODE, rate=1e30, memory_bandwidth=1.0)
    assert step_seconds(work, ZERO3, slow_memory).forward > 2 * 46e9


def test_expert_factors_are_multiplied_once_a_pass() -> None:
    """Mixtral 8x7B: rank 32 for gate and up in one weight, 16 for down, for each of 8 experts in 32 layers."""
    work = work_of("mixtral-8x7b")
    assert work.merging == 32 * 8 * (32 * 2 * 14336 * 4096 + 16 * 4096 * 14336)
    assert work.merged == 32 * 8 * (32 * (2 * 14336 + 4096) + 16 * (4096 + 14336))
    machine = replace(NODE, rate=1.0, memory_bandwidth=1e30)
    one, two = (_products(replace(work, length=length), machine) for length in (4096, 8192))
    assert 2 * one - two == pytest.approx(2 * work.merging)
    assert work_of("llama-3-8b").merging == 0


def _products(work: StepWork, machine: HardwareRates) -> float:
    """Return the FLOPs of a forward pass without attention."""
    return step_seconds(replace(work, attended=0.0), ZERO3, machine).forward


def test_fused_kernels_save_elementwise_traffic_alone() -> None:
    """On an 8B model: each part moves fewer bytes, forward and backward; products, updates and transfers stay."""
    plain = before = step_seconds(LLAMA, ZERO3, NODE)
    for number in range(1, 5):
        parts = ("norm", "rotary", "loss", "mlp")[:number]
        cost = step_seconds(replace(LLAMA, kernels=parts), ZERO3, NODE)
        assert cost.forward < before.forward and cost.backward < before.backward
        before = cost
        assert (cost.optimizer, cost.moved, cost.offload) == (plain.optimizer, plain.moved, plain.offload)
    least = step_seconds(replace(LLAMA, kernels=parts), ZERO3, replace(NODE, memory_bandwidth=float("inf")))
    assert least.forward == step_seconds(LLAMA, ZERO3, replace(NODE, memory_bandwidth=float("inf"))).forward


@pytest.mark.parametrize(("name", "less"), [("lion", "adamw"), ("adamw_8bit", "lion"), ("adamw", "adafactor")])
def test_optimizer_time_follows_its_memory_traffic(name: str, less: str) -> None:
    first, other = (
        step_seconds(work_of("llama-3-8b", strategy="zero0", optimizer=OPTIMIZERS[each]), STRATEGIES["zero0"], NODE)
        for each in (name, less)
    )
    assert first.optimizer < other.optimizer
    assert first.forward == other.forward


def test_offloaded_optimizers_run_at_the_cpus_rates() -> None:
    """The rate of torch's fused AdamW is measured; the others' kernels for CPUs take longer."""
    strategy = STRATEGIES["zero2_offload"]
    seconds = {
        name: step_seconds(work_of("llama-3-8b", strategy="zero2_offload", optimizer=recipe), strategy, NODE).optimizer
        for name, recipe in OPTIMIZERS.items()
    }
    assert seconds["adamw"] == pytest.approx(PHI / 8 / NODE.host_adamw)
    assert seconds["adamw"] < seconds["lion"] < seconds["adamw_8bit"]


def test_nvme_time_is_linear_in_optimizer_states() -> None:
    disk = {states: total(replace(LLAMA, update_states=states), "zero3_nvme", NODE) for states in (0.0, 4.0, 8.0)}
    assert disk[8.0] - disk[4.0] == pytest.approx(disk[4.0] - disk[0.0])
    assert disk[8.0] > disk[0.0]


def test_offload_moves_trained_shards() -> None:
    """φ/8 per rank: fp32 gradients and weights once; in four micro-steps gradients four times, three times back."""
    share = PHI / 8
    once = replace(LLAMA, accumulation=1)
    weights = ZERO3.gathered(once) / 8 * 2
    for work, strategy, sent in (
        (once, "zero2_offload", share * (4 + 2)),
        (LLAMA, "zero2_offload", share * (4 + 2 + 7 * 2)),
        (once, "zero3_offload", share * 6 + weights),
    ):
        assert step_seconds(work, STRATEGIES[strategy], NODE).offload == pytest.approx(sent / NODE.host.bandwidth)


# Properties


@given(works(), names, machines())
def test_terms_are_nonnegative_and_sum_to_the_step(work: StepWork, name: str, hardware: HardwareRates) -> None:
    cost = step_seconds(work, STRATEGIES[name], hardware)
    assert all(seconds >= 0 for seconds in cost.terms.values())
    assert all(count >= 0 for count in cost.moved.values())
    assert cost.hidden >= 0
    assert cost.total == pytest.approx(sum(cost.terms.values()))
    assert 0 < cost.total < float("inf")


@given(
    works(),
    names,
    machines(),
    st.floats(1, 100),
    st.sampled_from(["node", "network", "host", "memory", "disk", "rate"]),
)
def test_faster_hardware_saves_time(
    work: StepWork, name: str, hardware: HardwareRates, factor: float, which: str
) -> None:
    change: dict[str, Any]
    if which == "memory":
        change = {"memory_bandwidth": hardware.memory_bandwidth * factor}
    elif which == "rate":
        change = {"rate": hardware.rate * factor}
    elif which == "disk":
        change = {"disk": Disk("faster", hardware.disk.read * factor, hardware.disk.write * factor)}
    else:
        link: Link = getattr(hardware, which)
        change = {which: replace(link, bandwidth=link.bandwidth * factor)}
    assert total(work, name, replace(hardware, **change)) <= total(work, name, hardware) * (1 + 1e-9)


@given(works(), names, machines())
def test_checkpointing_is_never_faster(work: StepWork, name: str, hardware: HardwareRates) -> None:
    without, with_it = (replace(work, checkpointing=each) for each in (False, True))
    assert total(with_it, name, hardware) >= total(without, name, hardware) * (1 - 1e-9)


@given(works(), st.sampled_from(["zero3", "zero3_hpz", "fsdp", "fsdp_hybrid"]), machines(), st.integers(1, 4))
def test_more_micro_steps_never_send_less(work: StepWork, name: str, hardware: HardwareRates, parts: int) -> None:
    """At a fixed global batch, stage 3 gathers the model once a micro-step."""
    fewer = replace(work, micro_batch=work.micro_batch * parts)
    more = replace(work, accumulation=work.accumulation * parts)
    assert sum(moved(more, name, hardware).values()) >= sum(moved(fewer, name, hardware).values()) * (1 - 1e-9)


@given(works(), machines(least_nodes=2))
def test_hpz_is_never_slower_than_stage_3_between_nodes(work: StepWork, hardware: HardwareRates) -> None:
    assert total(work, "zero3_hpz", hardware) <= total(work, "zero3", hardware) * (1 + 1e-9)


@given(works(), names, machines())
def test_one_rank_sends_nothing(work: StepWork, name: str, hardware: HardwareRates) -> None:
    alone = replace(hardware, ranks_per_node=1, nodes=1)
    cost = step_seconds(replace(work, sequence_parallel=1), STRATEGIES[name], alone)
    assert sum(cost.moved.values()) == 0
    assert cost.communication_node == cost.communication_network == cost.hidden == 0


# The terms that decide


def test_overhead_dominates_small_models() -> None:
    """135M parameters on an H100: kernel launches and memory dominate, not matrix products."""
    small = replace(
        LLAMA,
        length=256,
        accumulation=1,
        frozen=134_515_008,
        trainable=2_442_240,
        matmul=134_479_872,
        modules=211,
        layers=30,
        hidden=576,
        heads=9,
        head_dim=64,
        vocabulary=49_152,
        checkpointing=False,
    )
    cost = step_seconds(small, STRATEGIES["zero0"], NODE)
    products = 4 * 256 * 134_479_872 / NODE.rate
    assert cost.total > 20 * products
    assert max(cost.terms, key=cost.terms.__getitem__) == "overhead"


def test_slow_network_delays_stage_3_but_not_hpz() -> None:
    slow = replace(FOUR_NODES, network=replace(FOUR_NODES.network, bandwidth=1e9))
    zero2, zero3, hpz = (total(LLAMA, name, slow) for name in ("zero2", "zero3", "zero3_hpz"))
    assert zero3 > 5 * zero2
    assert zero3 > 4 * hpz
    cost = step_seconds(LLAMA, STRATEGIES["zero3"], slow)
    assert max(cost.terms, key=cost.terms.__getitem__) == "communication_network"


def test_nvme_is_slower_than_memory() -> None:
    assert total(LLAMA, "zero3_nvme", NODE) > total(LLAMA, "zero3_offload", NODE) > total(LLAMA, "zero3", NODE)


# A published experiment

# Two 32 GB GPUs took 114, 112 and 114 s at stages 0, 1, 2 with offload, and 12 min at stage 3 with both offloads: 6.3
# times. GPUs, PCIe and host are not published: these are the table's 32 GB GPUs at their usual links.
MACHINES = [
    ("V100-32GB", "pcie3"),  # its only PCIe
    ("RTX-5090", "pcie3"),  # two cards on a consumer board: 8 lanes of PCIe 4 each
    ("RTX-5090", "pcie4"),  # the same of PCIe 5, or a host of PCIe 4
]


def reference_times(work: StepWork, hardware: HardwareRates) -> tuple[list[float], float]:
    """Return the seconds of stages 0, 1, 2 with offload, and how much slower stage 3 with both offloads is."""
    alike = [total(work, name, hardware) for name in ("zero0", "zero1", "zero2_offload")]
    return alike, total(work, "zero3_offload", hardware) / alike[0]


@pytest.mark.parametrize(("gpu", "link"), MACHINES)
def test_reference_experiment(gpu: str, link: str) -> None:
    alike, slower = reference_times(REFERENCE, named(gpu, link, "10gbe", "fp16", 2, host_link=link))
    assert max(alike) < 1.1 * min(alike)
    assert 4 < slower < 9


@pytest.mark.parametrize(("gpu", "link"), MACHINES)
@pytest.mark.parametrize("supervised", [20 / 64, 1.0])
@pytest.mark.parametrize("kernel_seconds", [8e-6, 30e-6])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_reference_experiment_is_robust_to_assumptions(
    gpu: str, link: str, supervised: float, kernel_seconds: float, share: float
) -> None:
    planned = named(gpu, link, "10gbe", "fp16", 2, host_link=link)
    hardware = replace(planned, kernel_seconds=kernel_seconds, rate=GPUS[gpu].half * share)
    alike, slower = reference_times(replace(REFERENCE, supervised=supervised), hardware)
    assert max(alike) < 1.1 * min(alike)
    assert 3 < slower < 11
