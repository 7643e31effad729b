"""Activation offload: which tensors move to the host, that the device frees them, that gradients stay equal."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training_plan import training_plan, zero_json

from zerolora.machine import devices
from zerolora.train import activation_offload
from zerolora.train.adapter import adapt

LAYERS = 4
FAMILIES = {
    "llama": {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    "gpt2": {"n_layer": LAYERS, "n_embd": 32, "n_head": 4},  # passes the mask to its layers, too
}


class Elsewhere(saved_tensors_hooks):
    """A stand-in for host memory: copies tensors and counts them."""

    packed: list[torch.Tensor]
    unpacked: int

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    @classmethod
    def pack(cls, tensor: torch.Tensor) -> torch.Tensor:
        cls.packed.append(tensor.detach().clone())
        return cls.packed[-1]

    @classmethod
    def unpack(cls, tensor: torch.Tensor) -> torch.Tensor:
        cls.unpacked += 1
        return tensor.clone()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> type[Elsewhere]:
    """Replace torch's save_on_cpu by a counting stand-in."""
    Elsewhere.packed, Elsewhere.unpacked = [], 0
    monkeypatch.setattr(activation_offload, "save_on_cpu", Elsewhere)
    return Elsewhere


def checkpointing(family: str, reentrant: bool) -> Any:
    """Return a four-layer model with activation checkpointing as in training."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(family, **FAMILIES[family], **tokens)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one step on padded rows."""
    torch.manual_seed(1)  # of dropout
    ids, mask = torch.arange(24).reshape(2, 12), torch.ones(2, 12)
    mask[0, :5] = 0
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("reentrant", [True, False])
def test_only_layer_inputs_are_offloaded(elsewhere: type[Elsewhere], family: str, reentrant: bool) -> None:
    model = checkpointing(family, reentrant)
    expected = gradients(model)
    assert not elsewhere.packed
    activation_offload.offload_inputs(model, torch.device("cpu"))
    inputs: list[torch.Tensor] = []
    layers = model.model.layers if family == "llama" else model.transformer.h
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    actual = gradients(model)
    assert len(elsewhere.packed) == elsewhere.unpacked == len(inputs) == LAYERS
    assert all(map(torch.equal, elsewhere.packed, inputs))
    assert actual.keys() == expected.keys() and len(actual) > LAYERS
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_device_frees_layer_inputs_until_backward(elsewhere: type[Elsewhere], reentrant: bool) -> None:
    """With a frozen embedding the first layer's input is a leaf of the graph: neither freed nor copied."""
    for frozen, leaves in ((False, 0), (True, 1)):
        model = checkpointing("llama", reentrant)
        model.model.embed_tokens.requires_grad_(not frozen)
        activation_offload.offload_inputs(model, torch.device("cpu"))
        inputs: list[StorageWeakRef] = []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda module, args, inputs=inputs: inputs.append(StorageWeakRef(args[0].untyped_storage()))
            )
        elsewhere.packed.clear()
        ids = torch.arange(24).reshape(2, 12)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert [each.expired() for each in inputs] == [False] * leaves + [True] * (LAYERS - leaves)
        assert len(elsewhere.packed) == LAYERS - leaves
        loss.backward()
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_training_offloads_only_if_configured(elsewhere: type[Elsewhere], tiny_model: Path, engine: str) -> None:
    for offload in (False, True):
        plan = training_plan(engine=engine, activation_checkpointing=True, activation_offload=offload)
        model = adapt(tiny_model, plan, zero_json(plan, stage=0), torch.device("cpu")).train()
        ids = torch.arange(24).reshape(2, 12)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
        # The first layer's is a leaf of the graph, since the embedding is frozen.
        assert len(elsewhere.packed) == elsewhere.unpacked == (model.config.num_hidden_layers - 1 if offload else 0)
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


class Streams(TorchDispatchMode):
    """Streams of a GPU on a CPU. What a stream copies happens as late as allowed: when another waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.computing = Stream(self)
        self.current: Stream | None = None
        self.late: list[Any] = []
        self.recorded: list[int] = []
        """Tensors whose memory no other may take before this stream has copied."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is None or function is not torch.ops.aten.copy_.default:
            return function(*args, **(kwargs or {}))
        assert kwargs is None or kwargs.get("non_blocking", True)
        target, source = args[:2]
        assert len(args) > 2 and args[2], "the host would wait"
        self.late.append((target, source))
        return target

    @contextlib.contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        self.current = stream
        yield
        self.current = None


class Stream:
    """A stream: the computing one, which computes at once, or another."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record_event(self) -> int:
        return len(self.streams.late)

    def wait_event(self, event: int) -> None:
        """Make the copies before the event."""
        assert self is self.streams.computing
        for number, pair in enumerate(self.streams.late[:event]):
            if pair is not None:
                with torch.no_grad():
                    torch._foreach_copy_([pair[0]], [pair[1]])
                self.streams.late[number] = None

    def wait_stream(self, other: "Stream") -> None:
        assert other is self.streams.computing is not self, "nothing else is to be waited for"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let a CPU pass for a GPU with streams."""
    made = Streams()
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(devices, "GPU", "cpu")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.computing)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, shape, device, pin_memory: empty(self, shape).fill_(math.nan)
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: made.recorded.append(self.data_ptr()))
    return made


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_stream_of_its_own_copies_beside_the_computation(streams: Streams, reentrant: bool) -> None:
    """Each copy is waited for before its result is used; the next tensor is fetched while a layer is computed."""
    model = checkpointing("llama", reentrant)
    expected = gradients(model)
    activation_offload.offload_inputs(model, torch.device("cpu"))
    under_way: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(
            lambda module, args: under_way.append(sum(pair is not None for pair in streams.late))
        )
    for _ in range(2):
        under_way.clear()
        with streams:
            actual = gradients(model)
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
        # Forward: the input of the layer leaves, with reentrant checkpointing that of the one before. Backward: that of
        # the layer before comes.
        assert under_way == [int(not reentrant)] + [1] * (LAYERS - 1) + [1] * (LAYERS - 1) + [0]
        assert len(streams.late) == 2 * LAYERS
        assert len(streams.recorded) == 2 * LAYERS
        streams.late.clear()
        streams.recorded.clear()
