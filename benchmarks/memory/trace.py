"""Trace the memory of one optimizer step of the real transformers + peft model under the real engine, without weights.

    .venv/bin/python benchmarks/memory/trace.py CASE

compare.py starts it with a case as JSON. Model, adapter, DeepSpeed's engine of any stage for any number of ranks, and
the optimizer all run. But the tensors are fake (torch's FakeTensorMode: shapes and storages, no bytes) and so are the
other ranks (torch's fake process group), so a 70B model on 64 GPUs is traced on a laptop. Each storage counts, in
blocks of 512 bytes as CUDA's allocator has them, from the operation that allocates it until its last reference is gone.
Prints JSON, in bytes.
"""

import argparse
import contextlib
import importlib
import json
import logging
import math
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolora.compat.deepspeed_patches import record_training_alone
from zerolora.compat.transformers_patches import computes_linearly
from zerolora.data.prepared_rows import IGNORED
from zerolora.memory.as_on_cuda import as_on_cuda
from zerolora.model.architecture import stacked_experts
from zerolora.model.fake_pass import even_splits
from zerolora.model.meta_device import settings_of
from zerolora.optimizers import OPTIMIZERS
from zerolora.testing import teacher_columns
from zerolora.train.engines.ddp import _compute_in
from zerolora.train.feed import collate
from zerolora.train.loop import Totals
from zerolora.train.loss import token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.kto import LONGEST, PARTNER
from zerolora.train.quantized_experts import unpack_while_computing
from zerolora.train.sequence_parallel import sequence

BLOCK = 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 2  # in the second step the optimizer's states exist, and DeepSpeed has its trace of stage 3
DEFAULTS = {
    "prepared_by": "zerolora", "quantization": "nf4", "targets": "all-linear", "added_tokens": 0, "optimizer": "adamw",
    "loss": "plain", "sequence_parallel": 1, "layers": None, "offload": False, "objective": None,
}  # fmt: skip
UNTIL_EXIT = contextlib.ExitStack()
Case = argparse.Namespace
"""The keys of a case of compare.py and of DEFAULTS."""


class Live(TorchDispatchMode):
    """Counts the bytes of all live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.peak = 0
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count its new storages."""
        if function is torch.ops.aten._local_scalar_dense.default:
            # Values are unknown. A norm and Adam's step of 1, and no overflow, allow the step.
            return 1.0 if args[0].dtype.is_floating_point else 0
        if function is torch.ops.aten.index.Tensor and args[1][0] is not None and args[1][0].dtype is torch.bool:
            # Values are unknown: half of them are true, as of the tokens and the answers of `collated`.
            args = (args[0], [torch.empty(len(args[1][0]) // 2, dtype=torch.long, device=args[0].device)])
        if function is torch.ops.aten._softmax_backward_data.default:
            # CUDA's kernel multiplies gradient and output first (aten/src/ATen/native/cuda/SoftMax.cu,
            # softmax_backward_cuda_out); the CPU's has no such temporary.
            temporary = args[0] * args[1]
            self.count(temporary)
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.count(value)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.storages.get(key)
        if known is not None and known() is not None:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def gone(_: Any) -> None:
            self.now -= size
            self.storages.pop(key, None)

        self.storages[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Restart the peak."""
        self.peak = self.now


def trace(case: Case) -> dict[str, Any]:
    """Return the bytes after each part of a step, and its peaks."""
    join_fake_ranks(case.ranks)
    sequence.set(case.sequence_parallel)
    compute_as_cuda_does()
    model = on_meta(case)
    if case.objective:
        case.batch, case.batch_before = collated(case), collated(case, before=True)
    live = Live()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        materialize(model)
        if case.method in ("qlora", "qdora"):
            unpack_while_computing(model)
        result = {"weights": live.now}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = built(case.optimizer, trained)
        engine = with_engine(model, optimizer, case)
        result["static"] = live.now
        for _ in range(STEPS):
            live.restart()
            result |= one_step(engine, optimizer, live, case)
        result["held"] = live.now
    return result


def built(name: str, trained: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer as on CUDA: with foreach, or with bitsandbytes' fused kernels, of which fakes exist."""
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    recipe = OPTIMIZERS[name]
    return recipe.build([{"params": trained}], 1e-4, 0.0, recipe.betas, recipe.epsilon, on_host=False)


def one_step(engine: Any, optimizer: Any, live: Live, case: Case) -> dict[str, int]:
    """Make one optimizer step on one micro-batch; return the bytes after the forward pass, and the peaks of forward
    pass, backward pass and step."""
    if case.objective:
        return step_of_objective(engine, optimizer, live, case)
    length = -(-case.length // case.sequence_parallel)
    ids = torch.zeros((case.micro_batch, length), dtype=torch.long)
    deepspeed = hasattr(engine, "allreduce_gradients")
    if case.loss == "fused":
        supervised = torch.arange(case.micro_batch * min(case.logits or case.length - 1, length))
        positions = {"position_ids": torch.zeros_like(ids)} if case.sequence_parallel > 1 else {}
        chosen = {"input_ids": ids, "supervised": supervised, **positions}
        loss = engine(use_cache=False, targets=torch.zeros_like(supervised), **chosen).sum()
    elif case.logits:
        logits = engine(input_ids=ids, use_cache=False, logits_to_keep=case.logits + 1).logits[:, :-1].float()
        targets = ids[:, -case.logits :].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none").sum()
        del logits
    else:
        outputs = engine(input_ids=ids, labels=ids, use_cache=False)  # outlives the step, as in most loops
        loss = outputs.loss
    result = {"forward": live.now, "peak_forward": live.peak}
    live.restart()
    engine.backward(loss) if deepspeed else loss.backward()
    del loss
    return result | {"peak_backward": live.peak} | update(engine, optimizer, live, result["peak_forward"], live.peak)


def update(engine: Any, optimizer: Any, live: Live, *peaks: int) -> dict[str, int]:
    """Make the optimizer's part of a step; return its peak, and that of the whole step, whose other parts had
    `peaks`."""
    live.restart()
    if hasattr(engine, "allreduce_gradients"):
        engine.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"peak_step": live.peak, "peak": max(*peaks, live.peak)}


def step_of_objective(engine: Any, optimizer: Any, live: Live, case: Case) -> dict[str, int]:
    """Make one optimizer step as train/loop.py does; return the same, and in `objective` the most that the objective's
    own tensors take, from its losses of tokens to their gradient."""
    objective = OBJECTIVES[case.objective]
    means = {}
    if objective.before:
        engine.eval()
        with torch.no_grad():
            batch = as_fake(case.batch_before)
            values_before = objective.values_before(token_losses(engine, batch), batch)
            means = {name: values_before[name].double().sum().item() for name in objective.before}
        del batch, values_before
        engine.train()
        if case.strategy.startswith("zero3"):
            engine.optimizer.empty_partition_cache()  # as train/engines/deepspeed.py does
    batch = as_fake(case.batch)
    totals = Totals(objective, dict.fromkeys(objective.units, 8), 1, torch.device("cpu"))
    losses = token_losses(engine, batch, objective.head_loss(batch))
    before, peak_before = live.now, live.peak
    live.restart()
    own = []
    losses.register_hook(lambda _: own.append(live.peak - before))
    values = objective.values(losses, batch, means)
    del losses
    terms = totals.add(values)
    loss = totals.weighted(terms, 1.0)
    own.append(live.peak - before)
    result = {"forward": live.now, "peak_forward": max(peak_before, live.peak)}
    live.restart()
    engine.backward(loss) if hasattr(engine, "allreduce_gradients") else loss.backward()
    del loss
    result |= {"peak_backward": live.peak, "objective": max(own)}
    return result | update(engine, optimizer, live, result["peak_forward"], live.peak)


def collated(case: Case, before: bool = False) -> dict[str, Any]:
    """Return a micro-batch for an objective, or that of the pass before a step. Each packed row has two sequences of
    half its length: a pair, or two rows. Their last tokens are supervised, `logits` of a packed row together; with 0
    all but the first."""
    objective = OBJECTIVES[case.objective]
    half = case.length // 2
    prompt = half - case.logits // 2 if case.logits else 1
    tokens = {"ids": [0] * half, "labels": [IGNORED] * prompt + [0] * (half - prompt)}
    row: dict[str, Any] = {name: tokens["labels" if name.endswith("labels") else "ids"] for name in objective.columns}
    row |= dict.fromkeys((*objective.numbers, "source"), 0)
    row |= teacher_columns(objective, half - prompt, getattr(objective, "top_k", 0))
    if objective.before:
        row |= {"prompt": prompt, LONGEST: half, PARTNER: row}
    sequences = objective.sequences_before(row) if before else objective.sequences(row)
    packed_row = sequences * (2 // len(sequences))
    # CUDA computes the rows of a packed row in one call, as attention without their lengths does here.
    return collate([packed_row] * case.micro_batch, True, torch.device("cpu")) | {"lengths": None}


def as_fake(value: Any) -> Any:
    """Return a batch, or a part of it, with new tensors."""
    if isinstance(value, dict):
        return {name: as_fake(each) for name, each in value.items()}
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def join_fake_ranks(ranks: int) -> None:
    """Become rank 0 of `ranks`, of which the others do not exist."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in variables.items()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def on_meta(case: Case) -> Any:
    """Return the model with its adapter on the meta device, as training builds it."""
    import peft
    from transformers import AutoModelForCausalLM

    from zerolora.config.method_sections import Lora, MethodSections
    from zerolora.methods.registry import TRAINABLE
    from zerolora.model.added_tokens import AddedToken, add_rows
    from zerolora.train import activation_offload
    from zerolora.train.attention import IMPLEMENTATIONS
    from zerolora.train.loss import make_chunked
    from zerolora.train.module_forwards import train_rows

    config = settings_of(Path(case.config).read_text(encoding="utf-8"), Path(case.config))
    if case.layers:
        config.num_hidden_layers = case.layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES[case.precision],
            attn_implementation=IMPLEMENTATIONS.get(case.attention, case.attention),
        )
        first = config.get_text_config().vocab_size
        rows = add_rows(model, [AddedToken("", first + index, True) for index in range(case.added_tokens)])
        if case.loss == "fused" or rows:
            make_chunked(model)
        if case.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        if case.offload:
            vars(activation_offload)["save_on_cpu"] = Elsewhere
            activation_offload.offload_inputs(model, torch.device("cpu"))
        if case.method in ("qlora", "qdora"):
            quantize(model, DTYPES[case.precision], case.quantization)
            unpack_for_norms()
        if case.prepared_by == "peft":
            prepare: Any = peft.prepare_model_for_kbit_training
            model = prepare(model, case.checkpointing)
        targets = case.targets if case.targets == "all-linear" else [case.targets]
        if case.method in ("lora", "dora", "qlora", "qdora"):
            lora = Lora(r=case.r, targets=targets, dropout=case.dropout)
            model = TRAINABLE[case.method].build(model, MethodSections(lora=lora), rows)
            train_rows(model)
        elif case.method == "vera":
            with torch.device("cpu"):  # whose generator peft draws with
                shared = peft.VeraConfig(r=case.r, target_modules=targets, task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, shared)
        elif case.method == "ia3":
            model = peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if case.strategy != "ddp":
            parameter.data = parameter.data.to(DTYPES[case.precision])
        elif parameter.requires_grad:
            parameter.data = parameter.data.float()  # as training keeps it (train/engines/engine.py, TorchEngine)
    return model.train()


class Elsewhere(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors leave the counted device and come back as new ones, as from a host; each while the one after it is
    used, as with train/activation_offload.py's OnOwnStream."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._coming: torch.Tensor | None = None

    def _pack(self, saved: torch.Tensor) -> None:
        self._saved.append((saved.shape, saved.dtype))

    def _unpack(self, _: None) -> torch.Tensor:
        shape, dtype = self._saved.pop()
        tensor = torch.empty(shape, dtype=dtype) if self._coming is None else self._coming
        self._coming = None
        if self._saved:
            self._coming = torch.empty(self._saved[-1][0], dtype=self._saved[-1][1])
        return tensor


def quantize(model: Any, dtype: torch.dtype, kind: str) -> None:
    """Replace every linear module but the head by one of 4 or 8 bits, as transformers does (needs bitsandbytes 0.50;
    transformers/integrations/bitsandbytes.py, replace_with_bnb_linear), and stacked experts by 4-bit parameters."""
    from bitsandbytes import nn as quantized
    from transformers.pytorch_utils import Conv1D

    four_bit_linear: Any = vars(quantized)["Linear4bit"]
    eight_bit_linear: Any = vars(quantized)["Linear8bitLt"]
    four_bits_of: Any = vars(quantized)["Params4bit"]
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (computes_linearly(module) or isinstance(module, Conv1D)) and module is not head:
                outputs, inputs = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
                bias = module.bias is not None
                if kind == "int8":
                    new = eight_bit_linear(inputs, outputs, bias, has_fp16_weights=False, threshold=6.0)
                else:
                    new = four_bit_linear(inputs, outputs, bias, dtype, quant_type="nf4")
                setattr(parent, name, new.to(dtype))
    for path, shapes in stacked_experts(model).items() if kind != "int8" else ():
        module = model.get_submodule(path)
        for name in shapes:
            module._parameters[name] = four_bits_of(module._parameters[name].to(dtype))
    model.requires_grad_(False)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"


def unpack_for_norms() -> None:
    """Make peft's DoRA unpack fake weights of 4 bits, and use only the shapes of those not yet quantized
    (peft/tuners/lora/dora.py, dequantize_module_weight)."""
    from bitsandbytes import functional

    dora: Any = importlib.import_module("peft.tuners.lora.dora")
    unpacked, dequantize = dora.dequantize_module_weight, vars(functional)["dequantize_4bit"]

    def of(module: Any) -> Any:
        if type(module).__name__ != "Linear4bit":
            return unpacked(module)
        if state := getattr(module.weight, "quant_state", None):
            return dequantize(module.weight.data, state)
        return torch.empty(module.out_features, module.in_features, dtype=module.compute_dtype, device="meta")

    dora.dequantize_module_weight = of


def eight_bits(module: Any) -> Any:
    """Return a fake weight of 8 bits, and set its module's constants (bitsandbytes/nn/modules.py, Linear8bitLt)."""
    weight = torch.nn.Parameter(torch.empty(module.weight.shape, dtype=torch.int8), requires_grad=False)
    weight.CB = weight.SCB = None  # type: ignore[attr-defined]  # as bitsandbytes' own weights have them
    module.state.CB, module.state.SCB = weight.data, torch.empty(len(weight))
    return weight


def four_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a fake weight of 4 bits with doubly quantized constants (bitsandbytes/functional.py, quantize_4bit)."""
    from bitsandbytes import functional

    state: Any = functional.QuantState
    count = math.prod(shape)
    blocks = -(-count // 64)
    weight: Any = torch.nn.Parameter(torch.empty((count // 2, 1), dtype=torch.uint8), requires_grad=False)
    second = state(
        torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256, quant_type=None, dtype=torch.float32
    )
    weight.quant_state = state(
        torch.empty(blocks, dtype=torch.uint8),
        shape=torch.Size(shape),
        dtype=dtype,
        blocksize=64,
        code=torch.empty(16),
        quant_type="nf4",
        offset=torch.empty(()),
        state2=second,
    )
    return weight


def compute_as_cuda_does() -> None:
    """Allocate as CUDA where the CPU differs, also in products of int8, for which the CPU has no kernels."""
    UNTIL_EXIT.enter_context(as_on_cuda())
    UNTIL_EXIT.enter_context(even_splits())

    def quantized(value: torch.Tensor, threshold: float = 0.0) -> Any:
        return torch.empty_like(value, dtype=torch.int8), torch.empty(len(value)), None

    def in_8_bits(value: torch.Tensor, codes: Any, weight: torch.Tensor, *_: Any) -> Any:
        sums = value.new_empty(len(value), len(weight), dtype=torch.int32)
        narrow = torch.empty_like(sums, dtype=torch.float16)
        del sums
        return narrow.to(value.dtype), value.new_empty(0)

    functions: Any = importlib.import_module("bitsandbytes.autograd._functions")
    functions.F.int8_vectorwise_quant = quantized
    operations: Any = torch.ops.bitsandbytes
    operations.int8_mixed_scaled_mm = in_8_bits
    # CUDA's class for the matmul; the CPU has another.
    functions.MatMul8bitFp = functions.MatMul8bitLt


def materialize(model: Any) -> None:
    """Replace every parameter and buffer of a meta model by a fake one; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if type(parameter).__name__ == "Params4bit":
                    made[id(parameter)] = four_bits(tuple(parameter.shape), parameter.dtype)
                if type(parameter).__name__ == "Int8Params":
                    made[id(parameter)] = eight_bits(module)
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def with_engine(model: Any, optimizer: Any, case: Case) -> Any:
    """Return the strategy's engine around the model. For ddp, whose buckets cannot be traced, return the model with the
    copies of trained weights that training computes with; other trainers of what peft prepares have no copies."""
    if case.strategy == "ddp":
        if case.prepared_by != "peft":
            _compute_in(DTYPES[case.precision], model)
        return model
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Other ranks do not exist, so they cannot agree.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    # DeepSpeed casts the model in place, which fake tensors do not allow; on_meta has cast it.
    torch.nn.Module._apply = lambda self, *_, **__: self  # type: ignore[method-assign]  # as the line above says
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=case.zero)[0]
    if case.strategy.startswith("zero3"):
        record_training_alone(engine.optimizer)
    return engine


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(trace(Case(**DEFAULTS | json.loads(sys.argv[1])))))
