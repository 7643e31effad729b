"""Trace the memory of one optimizer step of the real transformers + peft model under the real engine, without weights.

    .venv/bin/python benchmarks/memory/trace.py --model config/recipes/models/llama-3-8b.json --strategy zero2 \
        --ranks 8 --micro-batch 1 --sequence-length 4096

Everything runs: model, adapter, DeepSpeed's engine of any stage among any number of ranks, AdamW. But the tensors are
fake (torch's FakeTensorMode: shapes and storages, no bytes) and so are the other ranks (torch's fake process group),
so a 70B model on 64 GPUs is traced on a laptop. What is counted is each storage, in blocks of 512 bytes as CUDA's
allocator gives them, from the operation that makes it until the last reference to it is gone. Prints JSON, in bytes.
"""

import argparse
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

BLOCK = 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 2  # in the second step the optimizer's states are there, and DeepSpeed has its trace of stage 3


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and of what the most was made up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.explained = 0
        self.sizes: dict[int, tuple[Any, int, str]] = {}
        self.at_peak: Counter[str] = Counter()
        self.explain = False

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note the storages that it made."""
        if function is torch.ops.aten._local_scalar_dense.default:
            # No number is known. A norm and Adam's step of 1, and no overflow, let the step be made.
            return 1.0 if args[0].dtype.is_floating_point else 0
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
    compute_as_cuda_does()
    model = on_meta(options)
    live = Live()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        materialize(model)
        found = {"weights": live.now}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)  # as on CUDA
        engine = with_engine(model, optimizer, options)
        found["static"] = live.now
        if options.explain:
            print("static:", file=sys.stderr)
            show(live.composition())
        for step in range(STEPS):
            live.explain = options.explain and step == STEPS - 1
            live.restart()
            found |= one_step(engine, optimizer, live, options)
        found["held"] = live.now
    if options.explain:
        print("peak:", file=sys.stderr)
        show(live.at_peak)
    return found


def show(composition: Counter[str]) -> None:
    """Print what the most bytes are made up of."""
    for label, size in composition.most_common(25):
        print(f"{size / 2**20:12.2f} MiB  {label}", file=sys.stderr)


def one_step(engine: Any, optimizer: Any, live: Live, options: argparse.Namespace) -> dict[str, int]:
    """Make one optimizer step on one micro-batch; return the bytes after forward, and the most in forward, backward
    and step."""
    ids = torch.zeros((options.micro_batch, options.sequence_length), dtype=torch.long)
    deepspeed = hasattr(engine, "allreduce_gradients")
    if options.loss == "fused":
        supervised = torch.arange(options.micro_batch * (options.logits or options.sequence_length - 1))
        loss = engine(input_ids=ids, use_cache=False, supervised=supervised, targets=torch.zeros_like(supervised)).sum()
    elif options.logits:
        logits = engine(input_ids=ids, use_cache=False, logits_to_keep=options.logits + 1).logits[:, :-1].float()
        targets = ids[:, -options.logits :].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none").sum()
        del logits
    else:
        outputs = engine(input_ids=ids, labels=ids, use_cache=False)  # held until the step is over, as in most loops
        loss = outputs.loss
    found = {"forward": live.now, "peak_forward": live.peak}
    live.restart()
    engine.backward(loss) if deepspeed else loss.backward()
    del loss
    found |= {"peak_backward": live.peak}
    live.restart()
    if deepspeed:
        engine.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found |= {"peak_step": live.peak}
    found["peak"] = max(found["peak_forward"], found["peak_backward"], found["peak_step"])
    return found


def join_fake_ranks(ranks: int) -> None:
    """Be rank 0 of `ranks`, the others of which do not exist."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ |= {name: str(value) for name, value in place.items()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def on_meta(options: argparse.Namespace) -> Any:
    """Return the model with its adapter on the meta device, as training builds it."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerolora.train.attention import IMPLEMENTATIONS
    from zerolora.train.loss import make_chunked

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
        if options.loss == "fused":
            make_chunked(model)
        if options.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        if options.method == "qlora":
            quantize(model, DTYPES[options.precision])
        targets = options.lora_targets if options.lora_targets == "all-linear" else options.lora_targets.split(",")
        if options.method in ("lora", "dora", "qlora"):
            settings = peft.LoraConfig(
                r=options.lora_r,
                target_modules=targets,
                lora_dropout=options.lora_dropout,
                task_type="CAUSAL_LM",
                use_dora=options.method == "dora",
            )
            model = peft.get_peft_model(model, settings)
        elif options.method == "ia3":
            model = peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM"))
    if options.strategy != "ddp":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[options.precision])
    return model.train()


def quantize(model: Any, dtype: torch.dtype) -> None:
    """Replace every linear module but the head by one of 4 bits, as transformers does (needs bitsandbytes 0.50)."""
    import bitsandbytes

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is torch.nn.Linear and module is not head:
                new = bitsandbytes.nn.Linear4bit(
                    module.in_features, module.out_features, module.bias is not None, dtype, quant_type="nf4"
                )
                setattr(parent, name, new.to(dtype))
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True


def four_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a fake weight of 4 bits with doubly quantized constants (bitsandbytes/functional.py, quantize_4bit)."""
    from bitsandbytes.functional import QuantState

    count = math.prod(shape)
    blocks = -(-count // 64)
    weight = torch.nn.Parameter(torch.empty((count // 2, 1), dtype=torch.uint8), requires_grad=False)
    second = QuantState(
        torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256, quant_type=None, dtype=torch.float32
    )
    weight.quant_state = QuantState(  # type: ignore[attr-defined]
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
    """Take CUDA's way where the CPU's allocates otherwise: dropout with a mask of bytes, and fused attention that drops
    without one (which the CPU has no kernel for)."""
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def dropout(value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        assert not inplace
        return torch.native_dropout(value, p, True)[0] if training and p > 0 else value

    def without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs)

    functional.dropout = dropout  # type: ignore[assignment]
    functional.scaled_dot_product_attention = without_dropout


def materialize(model: Any) -> None:
    """Give every parameter and buffer of a meta model a fake storage; ties stay ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if type(parameter).__name__ == "Params4bit":
                    made[id(parameter)] = four_bits(tuple(parameter.shape), parameter.dtype)
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def with_engine(model: Any, optimizer: Any, options: argparse.Namespace) -> Any:
    """Return the engine of a strategy around the model; the model itself for ddp, whose buckets cannot be traced."""
    if options.strategy == "ddp":
        return model
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Other ranks do not exist, so they cannot agree.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    # DeepSpeed brings the model to its precision. Fake tensors cannot be changed in place: on_meta has done it.
    torch.nn.Module._apply = lambda self, *_, **__: self  # type: ignore[method-assign]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=json.loads(options.zero))[0]


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=("lora", "dora", "ia3", "full", "qlora"), default="lora")
    parser.add_argument("--lora-r", type=int, default=8)
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    parser.add_argument("--lora-targets", default="all-linear")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--zero", help="the DeepSpeed JSON")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--logits", type=int, default=0, help="positions with logits; 0: all")
    parser.add_argument("--loss", choices=("plain", "fused"), default="plain", help="fused: as training makes it")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--attention", choices=("flash", "sdpa", "eager"), default="sdpa")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--layers", type=int, help="other than config.json says")
    parser.add_argument("--explain", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(trace(arguments())))
