"""The registry of optimizers against the libraries: states, bytes, settings, and where each works."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, TINY_CONFIG
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_plan import training_plan

from benchmarks.memory import compare
from benchmarks.memory.trace import Live
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.errors import UserError
from zerolora.methods.method import TrainedParameters
from zerolora.methods.registry import create
from zerolora.model.read_spec import read_model_spec
from zerolora.optimizers import OPTIMIZERS, low_bits, torchao_adamw
from zerolora.optimizers.bnb import decoded, encode
from zerolora.optimizers.optimizer import Optimizer
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Buckets, Strategy, Target, nested
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:Paged")
SHAPES = ((64, 512), (512, 64), (8192,))
NOT_STATES = ("step", "RMS", "qmap1", "qmap2")  # scalars, and a codebook that all tensors share
PARAMETERS = TrainedParameters(0, 2 * 64 * 512 + 8192, 0.0, (), 64 * 512, 2 * (64 + 512) + 8192)


@pytest.fixture(params=OPTIMIZERS.values(), ids=str)
def recipe(request: pytest.FixtureRequest) -> Optimizer:
    optimizer: Optimizer = request.param
    return optimizer


def built(name: str, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer as training builds it."""
    plan = training_plan(optimizer=name, learning_rate=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CPU pages nothing
        return build_optimizer({str(number): tensor for number, tensor in enumerate(tensors)}, plan, on_host=True)


def trained(shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    """Return tensors with gradients."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    return tensors


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all states."""
    states = [state for states in optimizer.state.values() for name, state in states.items() if name not in NOT_STATES]
    return sum(state.numel() * state.element_size() for state in states if isinstance(state, torch.Tensor))


def test_its_states_match_the_library(recipe: Optimizer) -> None:
    """After a step of the library, and after `start`."""
    tensors = trained()
    stepped, started = built(recipe.name, tensors), built(recipe.name, trained())
    stepped.step()
    fresh = [tensor for group in started.param_groups for tensor in group["params"]]
    for tensor in fresh:
        recipe.start(started, tensor, 3)
    assert held_bytes(stepped) == held_bytes(started) == recipe.state_bytes(PARAMETERS)
    saved = 0
    for optimizer, of in ((stepped, tensors), (started, fresh)):
        with recipe.unpacked(optimizer, recipe.states):
            for tensor in of:
                states = [optimizer.state[tensor][name] for name in recipe.parts(tensor.shape)]
                assert all(state.dtype == torch.float32 for state in states)
                assert any(bool(state.any()) for state in states) == (optimizer is stepped)
                saved += sum(state.numel() * 4 for state in states)
    assert saved == 2 * recipe.saved_bytes(PARAMETERS)
    assert {int(started.state[tensor]["step"]) for tensor in fresh} == {3}
    assert stepped.state.keys() == set(tensors)


def quantized(types: Any) -> bool:
    """Return whether an operation has a tensor of torchao."""
    return any(kind.__name__.startswith("OptimState") for kind in types)


class Parts(Live):
    """Counts the storages of the operations within torchao's tensors as well."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if quantized(types) else super().__torch_dispatch__(function, types, args, kwargs)


class Moved(TorchDispatchMode):
    """Counts bytes that operations read and write; a tensor read twice by one operation counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if quantized(_types):
            return NotImplemented  # torchao's tensor answers by operations on its parts
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        arguments = {**dict(zip((each.name for each in function._schema.arguments), args, strict=False)), **kwargs}
        changed = [
            arguments[each.name]
            for each in function._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        made = [each for each in tree_leaves(changed or result) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage()._cdata for each in read.values()}
        if not changed and all(each.untyped_storage()._cdata in storages for each in made):
            return result  # a view
        self.bytes += sum(each.numel() * each.element_size() for each in [*read.values(), *made])
        return result


@pytest.mark.parametrize("name", ["adamw", "adafactor", "adamw_torch_8bit", "adamw_torch_4bit"])
def test_the_traffic_of_torchs_operations_is_as_counted(name: str) -> None:
    recipe, tensor = OPTIMIZERS[name], trained([(512, 512)])[0]
    optimizer = recipe.build([{"params": [tensor]}], 1e-3, 0.1, recipe.betas, recipe.epsilon, on_host=False)
    optimizer.step()
    with Moved() as moved:
        optimizer.step()
    assert moved.bytes / tensor.numel() == pytest.approx(recipe.traffic(), rel=0.01)


LOW_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}


@pytest.mark.parametrize("name", LOW_BITS)
@pytest.mark.parametrize("shape", [(512, 512), (1024, 1100)])
def test_the_temporary_bytes_of_a_low_bit_step_are_as_counted(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]
) -> None:
    """A tensor of one piece, and one of several."""
    for module in (low_bits, torchao_adamw):
        monkeypatch.setattr(module, "PIECE", 2**20)
    (tensor,) = trained([shape])
    optimizer = built(name, [tensor])
    optimizer.step()
    assert tensor.grad is not None
    with Parts() as live:
        for existing in (tensor, tensor.grad, *optimizer.state[tensor].values()):
            live.count(existing)
        held = live.now
        optimizer.step()
    expected = OPTIMIZERS[name].step_bytes(tensor.numel(), tensor.numel(), on_cpu=True)
    assert live.peak - held == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("name", "bits"), LOW_BITS.items())
def test_20_low_bit_steps_are_torchaos_to_the_bit(monkeypatch: pytest.MonkeyPatch, name: str, bits: int) -> None:
    """In several pieces, against torchao's own step, uncompiled: weights and decoded moments. Each step has many
    small operations, which takes the time."""
    assert low_bits.PIECE == torchao_adamw.PIECE and low_bits.BLOCK == torchao_adamw.BLOCK
    monkeypatch.setattr(low_bits, "PIECE", 2**13)
    shapes = (*SHAPES, (64, 50), (96, 256))
    whole, other = trained(shapes), trained(shapes)
    kind = getattr(low_bits.library().adam, f"AdamW{bits}bit")
    own = kind(other, lr=0.01, weight_decay=0.0, block_size=low_bits.BLOCK)
    optimizer = built(name, whole)
    stepped(whole, optimizer, range(20))
    with torch.compiler.set_stance("force_eager"):
        stepped(other, own, range(20))
    assert not torch.equal(whole[0], trained(shapes)[0])
    for one, two in zip(whole, other, strict=True):
        assert torch.equal(one, two)
    with OPTIMIZERS[name].unpacked(optimizer, low_bits.MOMENTS):
        for one, two in zip(whole, other, strict=True):
            for moment in low_bits.MOMENTS:
                librarys = own.state[two][moment]
                expected = librarys if one.numel() < low_bits.SMALLEST else librarys.dequantize()
                assert torch.equal(optimizer.state[one][moment], expected)


@pytest.mark.parametrize("name", LOW_BITS)
def test_a_last_block_may_be_shorter(name: str) -> None:
    """A partition of any size: its whole blocks are as of a tensor without the rest."""
    whole, rest = trained([(8192,)]), trained([(8192 + 100,)])
    rest[0].data[:8192] = whole[0].data
    optimizers = built(name, whole), built(name, rest)
    for step in range(5):
        rest[0].grad = torch.randn(8292, generator=torch.Generator().manual_seed(step))
        whole[0].grad = rest[0].grad[:8192].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(rest[0][:8192], whole[0])
    assert (rest[0][8192:] - trained([(8292,)])[0][8192:]).abs().mean() > 0.01
    assert held_bytes(optimizers[1]) - held_bytes(optimizers[0]) == held_bytes(optimizers[0]) / 32


@given(
    st.sampled_from([8, 4]),
    st.lists(st.just(0.0) | st.floats(-14, 0).map(lambda power: 10**power), min_size=1, max_size=20),
    st.integers(4096, 9000),
    st.integers(0, 2**31),
)
def test_low_bit_moments_survive_encoding_to_the_bit(bits: int, scales: list[float], size: int, seed: int) -> None:
    """Moments that torchao quantized, decoded and encoded by a checkpoint, decode to the same bytes (100 states)."""
    (tensor,) = trained([(size,)])
    recipe = OPTIMIZERS[f"adamw_torch_{bits}bit"]
    optimizer = built(recipe.name, [tensor])
    generator = torch.Generator().manual_seed(seed)
    strides = torch.tensor(scales).repeat_interleave(300).repeat(size)[:size]
    for _ in range(3):
        tensor.grad = torch.randn(size, generator=generator) * strides
        optimizer.step()
    state = optimizer.state[tensor]
    before = {moment: low_bits.decoded(state, moment, tensor.shape, bits) for moment in low_bits.MOMENTS}
    with recipe.unpacked(optimizer, low_bits.MOMENTS, write=True):
        pass
    for moment, value in before.items():
        assert torch.equal(low_bits.decoded(state, moment, tensor.shape, bits), value)


@pytest.mark.parametrize("bits", [8, 4])
def test_values_of_other_blocks_are_as_close_as_torchaos(bits: int) -> None:
    """What another strategy's checkpoint holds."""
    value = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    state: dict[str, Any] = {}
    low_bits.start(state, value, bits, 0)
    low_bits.encode(state, "exp_avg", value, bits)
    module = low_bits.library().bits8 if bits == 8 else low_bits.library().bits4
    librarys = (module.OptimState8bit if bits == 8 else module.OptimState4bit).zeros(value.shape, True, 256)
    librarys.copy_(value)
    own = (low_bits.decoded(state, "exp_avg", value.shape, bits) - value).abs().mean()
    assert 0 < own <= 1.15 * (librarys.dequantize() - value).abs().mean()


def test_torchao_is_imported_only_by_its_optimizers() -> None:
    """Where it is left out, other libraries still count it as not installed afterwards; no line on stderr."""
    script = (
        "import sys; from zerolora.compat.left_out import leave_out; leave_out('torchao')\n"
        "from zerolora.optimizers import OPTIMIZERS, low_bits\n"
        "assert low_bits.library().adam.AdamW8bit and sys.modules['torchao'] is None"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_one_kernel_moves_less_than_eight_passes() -> None:
    """On a GPU: the gradient once, weight and states in both directions."""
    on_gpu = {name: recipe.traffic() for name, recipe in OPTIMIZERS.items()}
    assert on_gpu["paged_adamw"] == 4 * (2 + 1 + 2 * 2)
    assert on_gpu["lion"] == 4 * (2 + 1 + 2)
    assert on_gpu["adamw_8bit"] == pytest.approx(4 * (2 + 1) + 2 * 2, abs=0.1)
    assert max(on_gpu["lion"], on_gpu["paged_adamw"]) < on_gpu["adamw"]


def stepped(tensors: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Make steps with the gradients of their numbers, the same numbers in the same places of all tensors' elements."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(sum(each.numel() for each in tensors), generator=generator)
        for each, part in zip(tensors, whole.split([each.numel() for each in tensors]), strict=True):
            each.grad = part.view_as(each)
        optimizer.step()


def test_adamw_on_the_host_is_fused_and_equals_the_reference_to_rounding() -> None:
    """The same bytes from a restored state, from shards, and with more threads."""
    whole, other = trained(), trained()
    reference = torch.optim.AdamW(other, lr=0.01, weight_decay=0.0, foreach=False)
    fused = built("adamw", whole)
    assert fused.param_groups[0]["fused"] is True
    on_gpu = build_optimizer({"a": trained()[0]}, training_plan(optimizer="adamw"), on_host=False)
    assert on_gpu.param_groups[0]["fused"] is None
    stepped(whole, fused, range(20))
    stepped(other, reference, range(20))
    changed = max(float((one - two).abs().max()) for one, two in zip(whole, trained(), strict=True))
    assert changed > 0.01
    for one, two in zip(whole, other, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-4 * changed)
        assert torch.allclose(fused.state[one]["exp_avg_sq"], reference.state[two]["exp_avg_sq"], rtol=1e-5, atol=1e-9)

    recipe, resumed = OPTIMIZERS["adamw"], trained()
    before = trained()
    first = built("adamw", before)
    stepped(before, first, range(7))
    second = built("adamw", resumed)
    for one, two in zip(resumed, before, strict=True):
        recipe.start(second, one, 7)
        one.data.copy_(two.data)
        for name in recipe.states:
            second.state[one][name].copy_(first.state[two][name])
    stepped(resumed, second, range(7, 20))

    flat = torch.cat([each.detach().flatten() for each in trained()])
    shards = [torch.nn.Parameter(part.clone()) for part in flat.split(-(-len(flat) // 3))]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads % 2 + 1)
    stepped(shards, built("adamw", shards), range(20))
    torch.set_num_threads(threads)
    expected = torch.cat([each.detach().flatten() for each in whole])
    assert torch.equal(torch.cat([each.detach().flatten() for each in resumed]), expected)
    assert torch.equal(torch.cat([each.detach() for each in shards]), expected)


def test_a_fused_kernel_has_its_updates_on_the_device_of_its_tensor() -> None:
    """On the meta device, whose tensors have no numbers."""
    tensor = torch.nn.Parameter(torch.empty(4, device="meta"))
    for on_host, where in ((True, "meta"), (False, "cpu")):
        optimizer = build_optimizer({"a": tensor}, training_plan(optimizer="adamw"), on_host)
        OPTIMIZERS["adamw"].start(optimizer, tensor, 3)
        assert optimizer.state[tensor]["step"].device.type == where


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_engines_update_on_the_host_under_every_offload(strategy: Strategy) -> None:
    target = Target(device="cuda", precision="bf16", nodes=1, ranks_per_node=2, nvme="/disk")
    sizes = Buckets(reduce=1, allgather=1, prefetch=1, persistence=1, live=1)
    options = nested(strategy.options(sizes, target))
    config = ZeroJson(
        options={"gradient_clipping": 1.0, **options},
        choice=training_plan(engine=strategy.engine, strategy=strategy.name),
    )
    engine = engine_class(strategy.engine)
    assert engine.updates_on_host(config, torch.device("cuda")) == (strategy.optimizer != "gpu")
    assert engine.updates_on_host(config, torch.device("cpu"))


def test_started_states_step_as_the_library(recipe: Optimizer) -> None:
    """From states that `start` creates or resets, a step equals the library's first."""
    whole, other, reset = trained(), trained(), trained()
    built(recipe.name, whole).step()
    optimizer = built(recipe.name, other)
    for tensor in other:
        recipe.start(optimizer, tensor, 0)
    optimizer.step()
    again = built(recipe.name, reset)
    again.step()
    for tensor, fresh in zip(reset, trained(), strict=True):
        tensor.data.copy_(fresh.data)
        recipe.start(again, tensor, 0)
    again.step()
    for one, two, three in zip(whole, other, reset, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_lora_plus_rates_and_decoupled_decay(recipe: Optimizer) -> None:
    """LoRA+: two groups at the loop's rates, as the library's optimizer at each rate; decoupled decay."""
    names = {"q.lora_A.weight": (64, 512), "q.lora_B.weight": (512, 64)}
    tensors = dict(zip(names, trained(names.values()), strict=True))
    plan = training_plan(optimizer=recipe.name, learning_rate=0.01, weight_decay=0.5, lora={"plus_ratio": 16.0})
    optimizer = build_optimizer(tensors, plan, on_host=True)
    assert [group["ratio"] for group in optimizer.param_groups] == [1.0, 16.0]
    for group in optimizer.param_groups:
        group["lr"] = group["ratio"] * 0.01
    optimizer.step()
    for (name, rate), apart in zip(
        (("q.lora_A.weight", 0.01), ("q.lora_B.weight", 0.16)), trained(names.values()), strict=True
    ):
        alone = recipe.build([{"params": [apart]}], rate, 0.5, recipe.betas, recipe.epsilon, on_host=True)
        alone.step()
        assert torch.equal(tensors[name], apart), name
    # Without gradient, only the decay acts.
    still = torch.nn.Parameter(torch.ones(64, 64))
    still.grad = torch.zeros(64, 64)
    recipe.build([{"params": [still]}], 0.1, 0.5, recipe.betas, recipe.epsilon, on_host=True).step()
    assert torch.allclose(still, torch.full((64, 64), 0.95))


def test_settings_reach_the_library(recipe: Optimizer) -> None:
    """From the config, or else the table's defaults, which are the library's."""
    settings: dict[str, Any] = {"weight_decay": 0.25, "learning_rate": 0.5}
    own: dict[str, Any] = {"betas": (0.8, 0.95)} if recipe.betas else {}
    own |= {"eps": 1e-5} if recipe.epsilon else {}
    named: dict[str, Any] = {"betas": [0.8, 0.95]} if recipe.betas else {}
    named |= {"epsilon": 1e-5} if recipe.epsilon else {}
    for chosen, wanted in ((named, own), ({}, {})):
        plan = training_plan(optimizer=recipe.name, **settings, **chosen)
        group = build_optimizer({"a": trained()[0]}, plan, on_host=True).param_groups[0]
        assert (group["weight_decay"], group["lr"]) == (0.25, 0.5)
        kind: Any = type(build_optimizer({"a": trained()[0]}, plan, on_host=True))
        if recipe.name != "adafactor":
            defaults = kind([trained()[0]]).param_groups[0]
            for name in ("betas", "eps"):
                assert group[name] == wanted.get(name, defaults[name])


@given(
    st.lists(st.just(0.0) | st.floats(-8, 0).map(lambda power: 10**power), min_size=1, max_size=20),
    st.integers(257, 5000),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_8_bit_states_survive_encoding(scales: list[float], size: int, seed: int, negative: bool) -> None:
    """Decoding and encoding a state repeatedly changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.nn.Parameter(torch.zeros(max(size, 4096)))
    optimizer: Any = built("adamw_8bit", [tensor])
    OPTIMIZERS["adamw_8bit"].start(optimizer, tensor, 0)
    state = optimizer.state[tensor]
    first = torch.randn(len(tensor), generator=generator) * torch.tensor(scales).repeat(len(tensor))[: len(tensor)]
    encode(state, 1, -first.abs() if negative else first)
    encode(state, 2, first.square())
    values = [decoded(state, number).clone() for number in (1, 2)]
    codes = [state[f"state{number}"].clone() for number in (1, 2)]
    for _ in range(3):
        for number in (1, 2):
            encode(state, number, decoded(state, number))
    for number in (1, 2):
        assert torch.equal(state[f"state{number}"], codes[number - 1])
        assert torch.allclose(decoded(state, number), values[number - 1], rtol=1e-6, atol=0)


def test_8_bit_states_are_as_close_as_the_librarys() -> None:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    value = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    tensor = torch.nn.Parameter(torch.zeros(8192))
    optimizer: Any = built("adamw_8bit", [tensor])
    OPTIMIZERS["adamw_8bit"].start(optimizer, tensor, 0)
    state = optimizer.state[tensor]
    encode(state, 1, value)
    codes, quantized = quantize_blockwise(value, code=state["qmap1"], blocksize=256)
    librarys = dequantize_blockwise(codes, quantized)
    own = (decoded(state, 1) - value).abs().mean()
    assert 0 < own <= 1.01 * (librarys - value).abs().mean()


def test_table_of_the_docs_is_the_registrys() -> None:
    table = ["| optimizer | built as | bytes a parameter | betas | epsilon | works with |", "|---|---|---|---|---|---|"]
    for each in OPTIMIZERS.values():
        betas = ", ".join(map(str, each.betas)) if each.betas else "none"
        table.append(
            f"| `{each.name}` | `{each.built}` | {each.cost} | {betas} | {each.epsilon or 'none'} | {each.where} |"
        )
    assert "\n".join(table) in (ROOT / "docs/methods.md").read_text(encoding="utf-8")


def test_the_estimate_is_within_two_percent_of_every_trace() -> None:
    rows = [row for row in compare.all_compared() if "optimizer" in row]
    assert {row["optimizer"] for row in rows} == {"lion", "adamw_8bit", "adafactor"}
    assert len(rows) == len(compare.of_optimizers())
    for row in rows:
        assert abs(row["error"]) < 0.02, compare.label(row)


@pytest.mark.parametrize("method", ["lora", "dora", "ia3", "full"])
def test_adafactor_states_match_the_real_adapter(method: str, tiny_model: Path) -> None:
    """Adafactor's states, counted from config.json, match peft's tensors."""
    import peft
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    if method == "ia3":
        model = peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM"))
    elif method != "full":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", use_dora=method == "dora"))
    shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    counted = create(method, r=4).parameters(read_model_spec(tiny_model), 4)
    assert counted.trained == sum(shape.numel() for shape in shapes)
    assert counted.factored == sum(sum(shape) if len(shape) > 1 else shape.numel() for shape in shapes)


# --- the config ---

REFUSED = [
    ({"optimizer": "sgd"}, "train.optimizer: 'sgd': use one of adamw, adamw_8bit, paged_adamw"),
    ({"optimizer": "paged_adamw"}, "train.optimizer: paged_adamw, and hardware.device is cpu"),
    ({"optimizer": "paged_adamw_8bit"}, "pages nothing; use adamw_8bit"),
    ({"optimizer": "adafactor"}, "train.optimizer: adafactor, and render.strategy is zero2, which holds"),
    ({"optimizer": "adafactor", "betas": [0.9, 0.99]}, "train.betas: [0.9, 0.99], but adafactor has none; remove it"),
    ({"optimizer": "lion", "epsilon": 1e-8}, "train.epsilon: 1e-08, but lion has none; remove it"),
    ({"betas": [0.9]}, "train.betas"),
    ({"betas": [0.9, 1.0]}, "train.betas"),
    ({"warmup_steps": 3, "warmup_ratio": 0.1}, "train.warmup_steps: conflicts with warmup_ratio; keep one of the two"),
    ({"schedule": "greedy"}, "train.schedule: 'greedy': use one of cosine, linear, constant, constant_with_warmup"),
    ({"schedule_options": {"power": 2.0}}, "'power' is not an option of the schedule; choose from num_cycles"),
    ({"schedule": "linear", "schedule_options": {"power": 2.0}}, "'power', but the schedule has no options; remove it"),
    (
        {"schedule": "polynomial", "schedule_options": {"power": "two"}},
        "power: 'two' is not valid; use a valid number",
    ),
    ({"schedule": "polynomial", "schedule_options": {"lr_end": 1.0}}, "lr_end: 1.0 is not below train.learning_rate"),
    ({"schedule": "warmup_stable_decay"}, "has no num_decay_steps, which the schedule needs"),
    (
        {"warmup_steps": 3},
        "train.warmup_steps: 3, but the run has 2 steps, so it never reaches its learning rate; use 2",
    ),
    (
        {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": 2}},
        "train.schedule_options: num_decay_steps: 2, but 1 of 2 steps are left after the warm-up; use 1 or less",
    ),
    (
        {"schedule": "one_cycle", "warmup_ratio": 0.1, "schedule_options": {"pct_start": 0.2}},
        "train.schedule_options: pct_start conflicts with warmup_ratio; keep one of the two",
    ),
    ({"schedule": "one_cycle"}, "train.schedule_options: one_cycle rises in 0.6 of 2 steps, so it only falls"),
    (
        {"schedule": "one_cycle", "schedule_options": {"pct_start": 0.6, "three_phase": True}},
        "train.schedule_options: pct_start: 0.6 with three_phase",
    ),
    ({"schedule": "cosine_with_min_lr"}, "needs one of min_lr and min_lr_rate"),
]


def config_of(folder: Path, train: dict[str, Any], strategy: str = "zero2", **hardware: Any) -> Path:
    """Write a config and return its path."""
    config: dict[str, Any] = copy.deepcopy(TINY_CONFIG)
    config["train"] |= train
    config["hardware"] |= hardware
    config["render"]["strategy"] = strategy
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "config.yaml"


@pytest.mark.parametrize(("train", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_impossible_settings_are_one_line(tmp_path: Path, train: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        load(config_of(tmp_path, train, "ddp" if "betas" in train else "zero2"))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


GPU = {"device": "cuda", "gpus_per_node": 2, "gpu_memory": "80GiB", "compute_capability": 9.0}
# The strategies that refuse an optimizer, on GPUs of one node with an NVMe disk.
REFUSED_UNDER = {
    "adamw": set(),
    "adamw_8bit": {"zero3_nvme"},
    "lion": {"zero3_nvme"},
    "adamw_torch_8bit": {"zero3_nvme"},
    "adamw_torch_4bit": {"zero3_nvme"},
    "paged_adamw": {name for name in STRATEGIES if "offload" in name or "nvme" in name},
    "paged_adamw_8bit": {name for name in STRATEGIES if "offload" in name or "nvme" in name},
    "adafactor": set(STRATEGIES) - {"zero0", "ddp"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_conflicts_with_strategies(tmp_path: Path, name: str) -> None:
    target = Target(device="cuda", precision="bf16", nodes=1, ranks_per_node=2, nvme="/nvme")
    refused = {each for each, strategy in STRATEGIES.items() if OPTIMIZERS[name].conflict(strategy, target)}
    assert refused == REFUSED_UNDER[name]
    load(config_of(tmp_path, {"optimizer": name}, "auto", **GPU))  # auto skips refused strategies
    on_cpu = Target(device="cpu", precision="fp32", nodes=1, ranks_per_node=2, nvme=None)
    everywhere = all(OPTIMIZERS[name].conflict(strategy, on_cpu) for strategy in STRATEGIES.values())
    assert everywhere == name.startswith("paged_")


def test_conflicting_strategies_do_not_fit(tmp_path: Path, tiny_model: Path) -> None:
    from zerolora.memory.estimate import Capacity, estimates
    from zerolora.memory.training_spec import TrainingSpec

    spec = TrainingSpec(
        "zero0", create("lora", r=4), 1, 2, 1, 1, 64, False, "sdpa", "bf16", optimizer=OPTIMIZERS["adafactor"]
    )
    actual = estimates(read_model_spec(tiny_model), spec, Capacity(2**36, 2**36), list(STRATEGIES))
    assert {entry["strategy"] for entry in actual if entry["fits"]} == {"zero0", "ddp"}
    assert "rows and columns" in next(entry["why"] for entry in actual if entry["strategy"] == "zero2")


def test_written_defaults_change_no_setting(tmp_path: Path) -> None:
    """So nothing runs again, and checkpoints still resume."""
    written = {"optimizer": "adamw", "betas": [0.9, 0.999], "epsilon": 1e-8, "warmup_ratio": 0.03}
    actual = [resolve(load(config_of(tmp_path, train))).runs["default"] for train in ({}, written)]
    assert actual[0] == actual[1]
    lion = resolve(load(config_of(tmp_path, {"optimizer": "lion", "warmup_steps": 2}))).runs["default"].train
    assert (lion.betas, lion.epsilon, lion.warmup_ratio) == ([0.9, 0.99], None, None)
