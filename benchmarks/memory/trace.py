"""Trace the memory of one optimizer step of the real transformers + peft model under the real engine, without weights.

    .venv/bin/python benchmarks/memory/trace.py --model config/recipes/models/llama-3-8b.json --strategy zero2 \
        --ranks 8 --micro-batch 1 --sequence-length 4096

Everything runs: model, adapter, DeepSpeed's engine of any stage among any number of ranks, AdamW. But the tensors are
fake (torch's FakeTensorMode: shapes and storages, no bytes) and so are the other ranks (torch's fake process group),
so a 70B model on 64 GPUs is traced on a laptop. What is counted is each storage, in blocks of 512 bytes as CUDA's
allocator gives them, from the operation that makes it until the last reference to it is gone. Prints JSON, in bytes.
"""

import argparse
import importlib
import json
import logging
import math
import os
import sys
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolora.optimizers import OPTIMIZERS
from zerolora.train.engines.ddp import _compute_in
from zerolora.train.sequence_parallel import sequence

BLOCK = 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 2  # in the second step the optimizer's states are there, and DeepSpeed has its trace of stage 3


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and of what the most was made up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.peak = self.explained = 0
        self.sizes: dict[int, tuple[Any, int, str]] = {}
        self.at_peak: Counter[str] = Counter()
        self.explain = False

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note the storages that it made."""
        if function is torch.ops.aten._local_scalar_dense.default:
            # No number is known. A norm and Adam's step of 1, and no overflow, let the step be made.
            return 1.0 if args[0].dtype.is_floating_point else 0
        if function is torch.ops.aten._softmax_backward_data.default:
            # CUDA's kernel multiplies gradient and output first (aten/src/ATen/native/cuda/SoftMax.cu,
            # softmax_backward_cuda_out); the CPU's needs no such tensor.
            temporary = args[0] * args[1]
            self.note(temporary, "softmax backward's temporary")
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.note(value, str(function))
        return result

    def note(self, tensor: torch.Tensor, what: str) -> None:
        """Count the storage of a tensor once, until it goes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.sizes.get(key)
        if known is not None and known[0]() is not None:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def gone(_: Any) -> None:
            self.now -= size
            self.sizes.pop(key, None)

        self.sizes[key] = weakref.ref(storage, gone), size, f"{what} {list(tensor.shape)} {tensor.dtype}"
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            if self.explain and self.now > self.explained:
                self.explained = self.now
                self.at_peak = self.composition()

    def composition(self) -> Counter[str]:
        """Return the bytes alive by operation, shape and type."""
        result: Counter[str] = Counter()
        for _, size, label in self.sizes.values():
            result[label] += size
        return result

    def restart(self) -> None:
        """Look for the most from here on."""
        self.peak = self.now


def trace(options: argparse.Namespace) -> dict[str, Any]:
    """Return the bytes held after each part of a step, and the most in it."""
    join_fake_ranks(options.ranks)
    sequence.set(options.sequence_parallel)
    compute_as_cuda_does()
    model = on_meta(options)
    live = Live()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        materialize(model)
        result = {"weights": live.now}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = built(options.optimizer, trained)
        engine = with_engine(model, optimizer, options)
        result["static"] = live.now
        if options.explain:
            print("static:", file=sys.stderr)
            show(live.composition())
        for step in range(STEPS):
            live.explain = options.explain and step == STEPS - 1
            live.restart()
            result |= one_step(engine, optimizer, live, options)
        result["held"] = live.now
    if options.explain:
        print("peak:", file=sys.stderr)
        show(live.at_peak)
    return result


def built(name: str, trained: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer as on CUDA: with foreach, or by the fused kernels that bitsandbytes' fake ones stand for."""
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    recipe = OPTIMIZERS[name]
    return recipe.build([{"params": trained}], 1e-4, 0.0, recipe.betas, recipe.epsilon)


def show(composition: Counter[str]) -> None:
    """Print what the most bytes are made up of."""
    for label, size in composition.most_common(25):
        print(f"{size / 2**20:12.2f} MiB  {label}", file=sys.stderr)


def one_step(engine: Any, optimizer: Any, live: Live, options: argparse.Namespace) -> dict[str, int]:
    """Make one optimizer step on one micro-batch; return the bytes after forward, and the most in forward, backward
    and step."""
    length = -(-options.sequence_length // options.sequence_parallel)
    ids = torch.zeros((options.micro_batch, length), dtype=torch.long)
    deepspeed = hasattr(engine, "allreduce_gradients")
    if options.loss == "fused":
        supervised = torch.arange(options.micro_batch * min(options.logits or options.sequence_length - 1, length))
        positions = {"position_ids": torch.zeros_like(ids)} if options.sequence_parallel > 1 else {}
        chosen = {"input_ids": ids, "supervised": supervised, **positions}
        loss = engine(use_cache=False, targets=torch.zeros_like(supervised), **chosen).sum()
    elif options.logits:
        logits = engine(input_ids=ids, use_cache=False, logits_to_keep=options.logits + 1).logits[:, :-1].float()
        targets = ids[:, -options.logits :].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none").sum()
        del logits
    else:
        outputs = engine(input_ids=ids, labels=ids, use_cache=False)  # held until the step is over, as in most loops
        loss = outputs.loss
    result = {"forward": live.now, "peak_forward": live.peak}
    live.restart()
    engine.backward(loss) if deepspeed else loss.backward()
    del loss
    result |= {"peak_backward": live.peak}
    live.restart()
    if deepspeed:
        engine.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    result |= {"peak_step": live.peak}
    result["peak"] = max(result["peak_forward"], result["peak_backward"], result["peak_step"])
    return result


def join_fake_ranks(ranks: int) -> None:
    """Be rank 0 of `ranks`, the others of which do not exist."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in place.items()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def on_meta(options: argparse.Namespace) -> Any:
    """Return the model with its adapter on the meta device, as training builds it."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerolora.methods.token_rows import row_options
    from zerolora.model.added_tokens import AddedToken, add_rows
    from zerolora.train import activation_offload
    from zerolora.train.attention import IMPLEMENTATIONS
    from zerolora.train.loss import make_chunked
    from zerolora.train.module_forwards import train_rows

    values = json.loads(Path(options.model).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**values)
    if options.layers:
        config.num_hidden_layers = options.layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES[options.precision],
            attn_implementation=IMPLEMENTATIONS.get(options.attention, options.attention),
        )
        first = config.get_text_config().vocab_size
        rows = add_rows(model, [AddedToken("", first + index, True) for index in range(options.added_tokens)])
        if options.loss == "fused" or rows:
            make_chunked(model)
        if options.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        if options.activation_offload:
            vars(activation_offload)["save_on_cpu"] = Elsewhere
            activation_offload.offload_inputs(model, torch.device("cpu"))
        if options.method in ("qlora", "qdora"):
            quantize(model, DTYPES[options.precision], options.quantization)
            unpack_for_norms()
        if options.prepared_by == "peft":
            prepare: Any = peft.prepare_model_for_kbit_training
            model = prepare(model, options.activation_checkpointing)
        targets = options.lora_targets if options.lora_targets == "all-linear" else options.lora_targets.split(",")
        if options.method in ("lora", "dora", "qlora", "qdora"):
            settings = peft.LoraConfig(
                r=options.lora_r,
                target_modules=targets,
                lora_dropout=options.lora_dropout,
                task_type="CAUSAL_LM",
                use_dora=options.method in ("dora", "qdora"),
                **row_options(model, rows, []),
            )
            model = peft.get_peft_model(model, settings)
            train_rows(model)
        elif options.method == "vera":
            with torch.device("cpu"):  # whose generator peft draws with
                shared = peft.VeraConfig(r=options.lora_r, target_modules=targets, task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, shared)
        elif options.method == "ia3":
            model = peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if options.strategy != "ddp":
            parameter.data = parameter.data.to(DTYPES[options.precision])
        elif parameter.requires_grad:
            parameter.data = parameter.data.float()  # as training keeps it (train/engines/engine.py, TorchEngine)
    return model.train()


class Elsewhere(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors go where none is counted, and come back as others, as from a host."""

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(lambda saved: (saved.shape, saved.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1]))


def quantize(model: Any, dtype: torch.dtype, kind: str) -> None:
    """Replace every linear module but the head by one of 4 or 8 bits, as transformers does (needs bitsandbytes 0.50;
    transformers/integrations/bitsandbytes.py, replace_with_bnb_linear)."""
    from bitsandbytes import nn as quantized
    from transformers.pytorch_utils import Conv1D

    four_bit_linear: Any = vars(quantized)["Linear4bit"]
    eight_bit_linear: Any = vars(quantized)["Linear8bitLt"]
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (type(module) is torch.nn.Linear or isinstance(module, Conv1D)) and module is not head:
                outputs, inputs = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
                bias = module.bias is not None
                if kind == "int8":
                    new = eight_bit_linear(inputs, outputs, bias, has_fp16_weights=False, threshold=6.0)
                else:
                    new = four_bit_linear(inputs, outputs, bias, dtype, quant_type="nf4")
                setattr(parent, name, new.to(dtype))
    model.requires_grad_(False)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"


def unpack_for_norms() -> None:
    """Have peft's DoRA take fake weights of 4 bits for what they are, and only shapes of those not yet quantized
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
    """Return a fake weight of 8 bits, and give its module the constants (bitsandbytes/nn/modules.py, Linear8bitLt)."""
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
    weight = torch.nn.Parameter(torch.empty((count // 2, 1), dtype=torch.uint8), requires_grad=False)
    second = state(
        torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256, quant_type=None, dtype=torch.float32
    )
    weight.quant_state = state(  # type: ignore[attr-defined]  # as bitsandbytes' own weights have it
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


class EfficientAttention(torch.autograd.Function):
    """What CUDA's memory-efficient attention allocates and saves.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def compute_as_cuda_does() -> None:
    """Take CUDA's way where the CPU's allocates otherwise: dropout with a mask of bytes, fused attention that drops
    without one, or has values of another width than its keys, and products of int8, for which the CPU has no kernels.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def dropout(value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        assert not inplace
        return torch.native_dropout(value, p, True)[0] if training and p > 0 else value

    def without_dropout(
        query: Any, key: Any, value: Any, *args: Any, dropout_p: float = 0.0, **kwargs: Any
    ) -> torch.Tensor:
        if value.shape[-1] != key.shape[-1]:
            efficient: Any = EfficientAttention.apply
            result: torch.Tensor = efficient(query, key, value)
            return result
        return attention(query, key, value, *args, **kwargs)

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
    # As CUDA's matmul, with the class that the CPU leaves for one of its own.
    functions.MatMul8bitFp = functions.MatMul8bitLt
    functional.dropout = dropout  # type: ignore[assignment]  # without torch's overloads
    functional.scaled_dot_product_attention = without_dropout


def materialize(model: Any) -> None:
    """Give every parameter and buffer of a meta model a fake storage; ties stay ties."""
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


def with_engine(model: Any, optimizer: Any, options: argparse.Namespace) -> Any:
    """Return the engine of a strategy around the model; for ddp, whose buckets cannot be traced, the model itself with
    the copies of trained weights that training computes with. What peft prepares is trained by others, without them."""
    if options.strategy == "ddp":
        if options.prepared_by != "peft":
            _compute_in(DTYPES[options.precision], model)
        return model
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Other ranks do not exist, so they cannot agree.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    # DeepSpeed brings the model to its precision. Fake tensors cannot be changed in place: on_meta has done it.
    torch.nn.Module._apply = lambda self, *_, **__: self  # type: ignore[method-assign]  # see above
    return deepspeed.initialize(model=model, optimizer=optimizer, config=json.loads(options.zero))[0]


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=("lora", "dora", "ia3", "vera", "full", "qlora", "qdora"), default="lora")
    parser.add_argument("--prepared-by", choices=("zerolora", "peft"), default="zerolora", help="a quantized model")
    parser.add_argument("--quantization", choices=("nf4", "int8"), default="nf4", help="of qlora")
    parser.add_argument("--lora-r", type=int, default=8)
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    parser.add_argument("--lora-targets", default="all-linear")
    parser.add_argument("--added-tokens", type=int, default=0, help="tokens whose rows are trained")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--zero", help="the DeepSpeed JSON")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share rows; with --loss fused")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--logits", type=int, default=0, help="positions with logits; 0: all")
    parser.add_argument("--loss", choices=("plain", "fused"), default="plain", help="fused: as training makes it")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--activation-offload", action="store_true", help="with --activation-checkpointing")
    parser.add_argument("--attention", choices=("flash", "sdpa", "eager"), default="sdpa")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--layers", type=int, help="other than config.json says")
    parser.add_argument("--explain", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(trace(arguments())))
