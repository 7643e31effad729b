"""Activation offload: which tensors go to the host, that the device holds none of them, that no gradient changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from training_plan import training_plan, zero_json

from zerolora.train import activation_offload
from zerolora.train.adapter import adapt

LAYERS = 4
FAMILIES = {
    "llama": {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    "gpt2": {"n_layer": LAYERS, "n_embd": 32, "n_head": 4},  # gives its layers the mask as an input, too
}


class Elsewhere(saved_tensors_hooks):
    """Stands for the host: tensors are copied to memory of their own, and counted."""

    packed: list[torch.Tensor]
    unpacked: int

    def __init__(self, pin_memory: bool) -> None:
        assert not pin_memory, "a CPU has no memory to pin"
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
    """Let what is offloaded go elsewhere."""
    Elsewhere.packed, Elsewhere.unpacked = [], 0
    monkeypatch.setattr(activation_offload, "save_on_cpu", Elsewhere)
    return Elsewhere


def checkpointing(family: str, reentrant: bool) -> Any:
    """Return a model of four layers that checkpoints them as training does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(family, **FAMILIES[family], **tokens)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Make a forward and a backward pass on padded rows, and return the gradients."""
    torch.manual_seed(1)  # of dropout
    ids, mask = torch.arange(24).reshape(2, 12), torch.ones(2, 12)
    mask[0, :5] = 0
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("reentrant", [True, False])
def test_every_layers_input_is_moved_and_nothing_else(elsewhere: type[Elsewhere], family: str, reentrant: bool) -> None:
    model = checkpointing(family, reentrant)
    expected = gradients(model)
    assert not elsewhere.packed
    activation_offload.offload_inputs(model, torch.device("cpu"))
    inputs: list[torch.Tensor] = []
    layers = model.model.layers if family == "llama" else model.transformer.h
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    found = gradients(model)
    assert len(elsewhere.packed) == elsewhere.unpacked == len(inputs) == LAYERS
    assert all(map(torch.equal, elsewhere.packed, inputs))
    assert found.keys() == expected.keys() and len(found) > LAYERS
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_device_holds_no_layers_input_until_its_backward_pass(elsewhere: type[Elsewhere], reentrant: bool) -> None:
    """But the first one's where the embedding is frozen: a leaf of the graph, which is not copied either."""
    for frozen, held in ((False, 0), (True, 1)):
        model = checkpointing("llama", reentrant)
        model.model.embed_tokens.requires_grad_(not frozen)
        activation_offload.offload_inputs(model, torch.device("cpu"))
        inputs: list[StorageWeakRef] = []

        def noted(module: Any, args: Any, inputs: list[StorageWeakRef] = inputs) -> None:
            inputs.append(StorageWeakRef(args[0].untyped_storage()))

        for layer in model.model.layers:
            layer.register_forward_pre_hook(noted)
        elsewhere.packed.clear()
        ids = torch.arange(24).reshape(2, 12)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert [each.expired() for each in inputs] == [False] * held + [True] * (LAYERS - held)
        assert len(elsewhere.packed) == LAYERS - held
        loss.backward()
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_cpu_keeps_the_same_tensors() -> None:
    """torch's own hook: as many storages live after the forward pass as without."""
    found = []
    for offloads in (False, True):
        model = checkpointing("llama", True)
        if offloads:
            activation_offload.offload_inputs(model, torch.device("cpu"))
        inputs: list[StorageWeakRef] = []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda module, args, inputs=inputs: inputs.append(StorageWeakRef(args[0].untyped_storage()))
            )
        ids = torch.arange(24).reshape(2, 12)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        found.append([each.expired() for each in inputs])
        del loss
    assert found == [[False] * LAYERS] * 2


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_training_offloads_if_asked(elsewhere: type[Elsewhere], tiny_model: Path, engine: str) -> None:
    """With the kind of checkpointing that the engine takes."""
    for asked in (False, True):
        plan = training_plan(engine=engine, activation_checkpointing=True, activation_offload=asked)
        model = adapt(tiny_model, plan, zero_json(plan, stage=0), torch.device("cpu")).train()
        ids = torch.arange(24).reshape(2, 12)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
        # The first layer's is a leaf of the graph, since the embedding is frozen.
        assert len(elsewhere.packed) == elsewhere.unpacked == (model.config.num_hidden_layers - 1 if asked else 0)
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
