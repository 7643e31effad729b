"""Traces the layers of a model of any architecture: its own class, forward and backward, on fake tensors.

Fake tensors (torch's FakeTensorMode) have shapes and storages without bytes, so a layer of any size takes milliseconds.
One layer of each kind is computed, whichever number the model has of it, in rows of a few lengths. Every storage counts
from the operation that allocates it until its last reference is gone; traced_parts.py extrapolates to other rows.
Operations are the CPU's, with the temporaries of CUDA's where those differ.
"""

import contextlib
import functools
import gc
import itertools
import re
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.config.method_sections import MethodSections
from zerolora.log import LOGGER
from zerolora.memory.as_on_cuda import as_on_cuda
from zerolora.memory.traced_parts import (
    BACKWARD,
    LENGTHS,
    MEASURES,
    SHORT_LENGTHS,
    WORK,
    LayerTrace,
    TracedPart,
    TracedPass,
    least,
)
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import auto_class, of_language_model
from zerolora.model.fake_pass import even_splits, faked, silent, tensors_in
from zerolora.model.layer_kinds import keep_one_of_each_kind, kinds_of
from zerolora.model.meta_device import settings_of
from zerolora.model.spec import ModelSpec

DTYPES = {2: torch.bfloat16, 4: torch.float32}
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION = (FORWARD, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
NOISE = 0.01
"""Of a measure: less does not tell whether several rows are computed otherwise than one."""
MIXING = (torch.ops.aten.convolution, torch.ops.aten.constant_pad_nd, torch.ops.aten.cumsum)
"""Operations in which a module mixes tokens otherwise than by attention; of integers they count, as experts' tokens."""
ALONE = "traced_alone"
"""Name of attention without a mask, as train/attention.py computes rows."""


def trace_layers(model: ModelSpec, traced: TracedPass) -> LayerTrace:
    """Return what a model's layers allocate in a pass. Raises any error of its class that prevents the passes."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it logs that kernels of other packages are missing
    gc.freeze()  # or each collection during the passes would visit all that was imported
    try:
        with silent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training shows them
            try:
                return _traced(model, traced, whole=False)
            except Exception as error:  # some classes compute what depends on the number of layers, as Gemma 3n's do
                LOGGER.debug("with one layer of each kind, a pass ends with %s; with all layers instead", error)
                return _traced(model, traced, whole=True)
    finally:
        gc.unfreeze()
        transformers_logging.set_verbosity(verbosity)


def _traced(model: ModelSpec, traced: TracedPass, whole: bool) -> LayerTrace:
    """Return the trace of one layer of each kind, computed alone or, if `whole`, among all layers."""
    bitsandbytes_patches.load()  # which peft imports
    settings = settings_of(model.config, Path("config.json"))
    attention = of_language_model(settings, {"flash": ALONE}.get(traced.attention, traced.attention))
    with torch.device("meta"):
        built = auto_class(settings).from_config(
            settings, trust_remote_code=False, attn_implementation=attention, dtype=DTYPES[traced.width]
        )
        path = model.in_layers[0].stack
        # In training, the input of the very first needs no gradient.
        order = kinds_of(built, path) if whole else keep_one_of_each_kind(built, path, first_twice=True)
        stack = built.get_submodule(path)
        decoder = _decoder(built)
        if traced.method is not None:
            quantized = _quantized(built, traced)
            built = _adapted(built, model, traced)
            for module in quantized:  # then only: peft is not told to adapt a class that computes otherwise
                module.__class__ = Unpacked
                vars(module)["computed"] = DTYPES[traced.weight_width]
    for parameter in built.parameters():
        if parameter.is_floating_point():
            width = traced.trained_width if parameter.requires_grad else traced.width
            parameter.data = parameter.data.to(DTYPES[width])
    built.train()
    with _Fake(allow_non_fake_inputs=True) as mode, faked(built) as known, as_on_cuda(), even_splits():
        passes = _Passes(mode, decoder, list(stack), traced, known)
        lengths, step = passes.lengths()
        measured = {size: passes.measure(*size) for size in least(lengths)}
        if not _additive(*(measured[rows, lengths[0]] for rows in (1, 2, 3))):
            measured |= {(2, each): passes.measure(2, each) for each in lengths[1:]}
        if step > 1:
            measured[1, lengths[0] + 1] = passes.measure(1, lengths[0] + 1)
        hidden = passes.hidden // passes.tokens
    made = [
        TracedPart.of(lengths, step, {size: values[number] for size, values in measured.items()})
        for number in range(len(passes.layers) + 2)
    ]
    layers = made[1:-1]
    # The first layer, whose input needs no gradient, is another one, or stands for its kind if it is the only one.
    at = {kind: number for number, kind in reversed([*enumerate(order)][1:])} if whole else {}
    own = [layers[at.get(kind, 0) if whole else kind + 1] for kind in range(max(order) + 1)]
    return LayerTrace(tuple(order), hidden, made[0], layers[0], tuple(own), made[-1])


def _additive(*measured: list[dict[str, int]]) -> bool:
    """Return whether one, two and three rows take bytes that grow by as much with each row."""
    return all(
        abs(three[name] - 2 * two[name] + one[name]) <= NOISE * one[name]
        for one, two, three in zip(*measured, strict=True)
        for name in one
    )


def _decoder(model: Any) -> Any:
    """Return the part of a model that computes the hidden states before its head."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model.get_output_embeddings() else decoder


def _adapted(built: Any, model: ModelSpec, traced: TracedPass) -> Any:
    """Return the model with the method's trained parameters, of the modules and the rank that the estimate counts."""
    method = traced.method
    assert method is not None
    built.requires_grad_(False)
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    adapted = _adapted_paths(built, model, dict(traced.ranks))
    section: dict[str, Any] = {"targets": list(adapted)}
    if (r := values.get("r")) is not None:
        section |= {"r": r, "dropout": values["dropout"]}
        if method.name != "vera":
            section["rank_pattern"] = {re.escape(path): own for path, own in adapted.items() if own and own != r}
    kind = {"ia3": "ia3", "vera": "vera"}.get(method.name, "lora")
    sections = {} if method.trains_base else {kind: section}
    return TRAINABLE[method.name].build(built, MethodSections.model_validate(sections))


def _adapted_paths(built: Any, model: ModelSpec, ranks: dict[str, int]) -> dict[str, int]:
    """Return the adapted modules and parameters of the layers by their paths, with r; 0 for a parameter, whose r
    follows from the method's."""
    names: dict[str, list[str]] = {}
    for name, _ in (*built.named_modules(), *built.named_parameters()):
        names.setdefault(re.sub(r"\.\d+(?=\.|$)", ".{}", name, count=1), []).append(name)
    modules = {name for name, _ in built.named_modules()}
    return {
        name: r if name in modules else 0
        for path, r in ranks.items()
        for name in names.get(path, ())
        if path.startswith(f"{model.in_layers[0].stack}.")
    }


class Unpacked(torch.nn.Linear):
    """A linear module whose weight is unpacked during each product, as those of 4 and 8 bits are on CUDA
    (methods/qlora.py)."""

    computed: torch.dtype

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the product, as a copy, which peft makes of it (peft/tuners/lora/bnb.py)."""
        before = value.dtype
        result = _Product.apply(value.to(self.computed), self.in_features, self.out_features)  # type: ignore[no-untyped-call]
        copied: torch.Tensor = result.to(before).clone()
        return copied


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
        ctx.sizes = outputs, inputs
        return torch.nn.functional.linear(value, value.new_empty(outputs, inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] @ gradients[0].new_empty(*ctx.sizes), None, None


def _quantized(built: Any, traced: TracedPass) -> list[Any]:
    """Return the linear modules that the method quantizes."""
    assert traced.method is not None
    if traced.method.frozen_type is None:
        return []
    modules = map(built.get_submodule, quantizable_paths(built))
    return [module for module in modules if isinstance(module, torch.nn.Linear)]


class _Fake(FakeTensorMode):
    """Computes on fake tensors, and lets `live` count the operations while it is set: one mode for both takes less
    time than two."""

    live: "_Live | None" = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and the wrapper takes time in each operation

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        live, self.live = self.live, None  # other operations that this one consists of are not counted
        if live is None:
            return self.dispatch(function, types, args, kwargs or {})
        try:
            live.begins()
            if live.cuda and function is torch.ops.aten._softmax_backward_data.default:
                # CUDA's kernel multiplies gradient and output first (aten/src/ATen/native/cuda/SoftMax.cu).
                with self:
                    temporary = args[0] * args[1]
                live.count(temporary, temporary.untyped_storage())
            if function is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
                with self:
                    result: Any = _grouped(*args, **(kwargs or {}))
            else:
                result = self.dispatch(function, types, args, kwargs or {})
            live.computed(function, args, kwargs or {}, result)
        finally:
            self.live = live
        return result

    @contextlib.contextmanager
    def counted_by(self, live: "_Live") -> Iterator[None]:
        """Let `live` count the operations in the block."""
        self.live = live
        try:
            yield
        finally:
            self.live = None


class _Live:
    """Counts the bytes of live storages; tells `begins` before each operation."""

    def __init__(self, known: Iterable[torch.Tensor], cuda: bool, begins: Callable[[], None]) -> None:
        self.now = self.gradients = 0
        self.work = dict.fromkeys(WORK, 0)
        self.mixes = False
        """Whether one of MIXING was computed, since this was last set."""
        self.peaks: list[int] = [0, 0]
        self.cuda, self.begins = cuda, begins
        self.storages: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        for tensor in known:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage), 0

    def computed(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operation's new storages and its work."""
        results = tensors_in(result)
        storages = [each.untyped_storage() for each in results]
        for value, storage in zip(results, storages, strict=True):
            self.count(value, storage)
        read = tensors_in((args, kwargs))
        owned = {each.untyped_storage()._cdata for each in read}
        made = not owned.issuperset(each._cdata for each in storages)
        if made or (results and function._schema.is_mutable):  # otherwise a view
            self.add_work(function.overloadpacket, args, kwargs, result, read + results)

    def add_work(self, function: Any, args: Any, kwargs: Any, result: Any, tensors: list[torch.Tensor]) -> None:
        """Count an operation's work: floating-point operations of a product, or the bytes of `tensors`, which it reads
        and writes."""
        self.work["operations"] += 1
        self.mixes |= function in MIXING and result.is_floating_point()
        aten = torch.ops.aten
        if function in ATTENTION:
            query, key = args[0 if function is FORWARD else 1], args[1 if function is FORWARD else 2]
            factor = 4 if function is FORWARD else 10  # the backward pass computes the scores again
            self.work["scores"] += factor * query.numel() * key.shape[-2]
        elif function is aten._grouped_mm:
            first, second = args[:2]
            by_group = result.dim() == 3 and first.dim() == 2
            count = first.numel() * second.shape[-1] if by_group else result.numel() * first.shape[-1]
            self.work["flops"] += 2 * count
        elif function in flop_registry:
            self.work["flops"] += flop_registry[function](*args, **kwargs, out_val=result)
        else:
            sizes = [(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors]
            self.work["moved"] += sum(map(min, sizes))

    def count(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Count the storage of a tensor once, until it is freed."""
        key = storage._cdata
        known = self.storages.get(key)
        if (known is not None and known[0]() is not None) or tensor.device.type == "meta":
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            self.storages.pop(key, None)
            if key in self.sizes:
                self.gradients -= self.sizes.pop(key)

        self.storages[key] = weakref.ref(storage, gone), size
        self.now += size
        self.peaks = list(map(max, self.peaks, self._now()))

    def is_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as one from now on."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.gradients += storage.nbytes()

    def restart(self) -> None:
        """Reset the peaks to the live bytes."""
        self.peaks = self._now()

    def _now(self) -> list[int]:
        """Return the live bytes, and those without gradients."""
        return [self.now, self.now - self.gradients]


class _Paddings(TorchFunctionMode):
    """Notes by how many elements tensors are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if function is torch.nn.functional.pad:
            self.seen.update(args[1] if len(args) > 1 else (kwargs or {})["pad"])
        return function(*args, **(kwargs or {}))


class _Passes:
    """A forward pass without gradients, and a forward and a backward pass, of a decoder, by its parts: what comes
    before the layers, each layer, and what comes after them."""

    def __init__(
        self, mode: _Fake, decoder: Any, layers: list[Any], traced: TracedPass, known: list[torch.Tensor]
    ) -> None:
        self.mode, self.decoder, self.layers, self.traced, self.known = mode, decoder, layers, traced, known
        self.hidden = 0
        """Bytes of the hidden states that a layer passes on."""

    def lengths(self) -> tuple[tuple[int, ...], int]:
        """Return the tokens of rows to measure, and what the class pads them to a multiple of.

        A class computes by tokens if a row of twice as many takes many more operations, both within the chunks in which
        classes divide rows.
        """
        counts, paddings = [], []
        for length in SHORT_LENGTHS[:2]:
            ids = self._start(1, length)
            with self.mode.counted_by(self.live), self._marked(), torch.no_grad(), _Paddings() as noted:
                self._forward(ids)
            counts.append(sum(work.get("operations", 0) for work in self.works))
            paddings.append(noted.seen)
        if counts[1] > 1.25 * counts[0]:
            return SHORT_LENGTHS, 1
        more = SHORT_LENGTHS[1] - SHORT_LENGTHS[0]
        step = max((SHORT_LENGTHS[0] + each for each in paddings[0] if each - more in paddings[1]), default=1)
        # Of two chunks at least: another operation may have the highest peak in one.
        return tuple(each * (-(-2 * step // LENGTHS[0]) if step > 1 else 1) for each in LENGTHS), step

    def _start(self, rows: int, length: int) -> torch.Tensor:
        """Start to count; return the tokens of the rows."""
        ids = torch.zeros((rows, length), dtype=torch.int64)
        self.tokens = rows * length
        count = len(self.layers) + 2
        self.live, self.part, self.next = _Live([*self.known, ids], not self.traced.on_cpu, self._begin), 0, 0
        self.entered, self.most = [0] * count, [0] * count
        self.works: list[dict[str, int]] = [{} for _ in range(count)]
        self.returned, self.mixing = [0] * count, [0] * count
        return ids

    def measure(self, rows: int, length: int) -> list[dict[str, int]]:
        """Return the measures of each part, as TracedPart has them, at one size of rows."""
        ids, count = self._start(rows, length), len(self.layers) + 2
        live = self.live
        result: list[dict[str, int]] = [{} for _ in range(count)]
        with self.mode.counted_by(live), self._marked():
            with torch.no_grad():
                self._forward(ids)
            for part in range(count):
                result[part] |= dict.fromkeys(MEASURES, 0) | self.works[part]
                result[part]["alone"] = self.most[part] - self.entered[part]
            if self.traced.method:
                self._with_gradients(ids, result)
        return result

    def _with_gradients(self, ids: torch.Tensor, result: list[dict[str, int]]) -> None:
        live, count = self.live, len(result)
        self.part = self.next = 0
        self.entered, self.most = [0] * count, [0] * count
        self.numbers = [torch._C._autograd._get_sequence_nr()]
        live.restart()
        self.inputs: list[dict[int, list[Any]]] = [{} for _ in range(count)]
        self.unsaved, self.freed = [0] * count, [0] * count
        with self._noted_inputs():
            edge, gradient = self._forward(ids)
        ends = [*self.entered[1:], live.now - gradient.untyped_storage().nbytes()]
        for part in range(count):
            result[part]["forward"] = self.most[part] - self.entered[part]
            result[part]["kept"] = ends[part] - self.entered[part]
            result[part] |= self.works[part] | {"inputs": self.unsaved[part], "input": self.freed[part]}
            result[part] |= {"returned": self.returned[part], "mixing": self.mixing[part]}
        result[0]["loose"] = self.loose
        self.back = count - 1
        self.started, self.peaked = [[0, 0]] * count, [[0, 0]] * count
        live.restart()
        self.started[self.back] = list(live.peaks)
        live.begins = self._begin_backward
        collected = [0] * count
        handles = []
        for each in {id(each): each for each in self.decoder.parameters() if each.requires_grad}.values():

            def collect(parameter: torch.Tensor) -> None:
                live.is_gradient(parameter)
                collected[self.back] += parameter.numel() * parameter.element_size()

            handles.append(each.register_post_accumulate_grad_hook(collect))
        torch.autograd.backward([edge], [gradient])
        del gradient, edge, self.gradient
        self._left()
        for handle in handles:
            handle.remove()
        for each in self.decoder.parameters():
            each.grad = None
        for part in range(count):
            begun, peak = self.started[part], self.peaked[part]
            result[part]["with_gradients"] = max(0, peak[0] - begun[0])
            result[part]["backward"] = max(0, peak[1] - begun[1])
            result[part]["gradients"] = collected[part]
            result[part] |= {f"{name}{BACKWARD}": value for name, value in self.works[part].items()}

    def _forward(self, ids: torch.Tensor) -> Any:
        """Compute the hidden states; return their edge in the graph and a gradient of them, if they have any."""
        result = self.decoder(input_ids=ids, use_cache=False)
        hidden = result.last_hidden_state if hasattr(result, "last_hidden_state") else result[0]
        del result
        self._begin()
        self._end()
        if hidden.grad_fn is None:
            return None
        gradient = torch.empty_like(hidden)
        return torch.autograd.graph.get_gradient_edge(hidden), gradient

    @contextlib.contextmanager
    def _noted_inputs(self) -> Iterator[None]:
        """Note the inputs of frozen linear modules, which DeepSpeed's save at stage 3
        (deepspeed/runtime/zero/linear.py)."""
        functional = vars(torch.nn.functional)
        usual = functional["linear"]

        def linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            storage = value.untyped_storage()
            noted = self.inputs[self.part].setdefault(storage._cdata, [])
            if not noted or noted[-1][0]() is None:  # another one, at the address of one that is freed
                noted.append((weakref.ref(storage), storage.nbytes()))
            result: torch.Tensor = usual(value, weight, bias)
            return result

        functional["linear"] = linear
        try:
            yield
        finally:
            functional["linear"] = usual

    def _end(self) -> None:
        """Note the measures of a part at its end."""
        self.most[self.part] = self.live.peaks[0]
        self.works[self.part] = self.live.work
        self.live.work = dict.fromkeys(WORK, 0)
        if torch.is_grad_enabled():
            self.unsaved[self.part] = _freed(itertools.chain(*self.inputs[self.part].values()))
            if self.part:
                self.freed[self.part] = _freed([self.passed])
            if self.part > len(self.layers):
                self.freed[0], self.loose = _freed([self.embedded]), _freed(self.tables)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Let layers tell their beginning and end, and all but the first have an input that needs a gradient."""
        handles = []
        for number, layer in enumerate(self.layers):
            enter = functools.partial(self._enter, number + 1)
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(functools.partial(self._leave, number + 1)))
            for child in layer.children():
                handles.append(child.register_forward_pre_hook(self._enter_module))
                handles.append(child.register_forward_hook(self._leave_module))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, part: int, _module: Any, args: Any, kwargs: Any) -> None:
        if part != self.next + 1:
            raise RuntimeError("its layers are not computed once each and in their order")
        hidden = args[0] if args else kwargs["hidden_states"]
        if part > 1 and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_(True)
        self.next, self.number = part, torch._C._autograd._get_sequence_nr()
        self._begin()
        storage = hidden.untyped_storage()
        self.passed = weakref.ref(storage), storage.nbytes()
        if part == 1:
            self.embedded = self.passed
            self.tables = [(each, size) for key, (each, size) in self.live.storages.items() if key != storage._cdata]

    def _enter_module(self, _module: Any, _inputs: Any) -> None:
        self.before, self.live.mixes = self.live.work["operations"], False

    def _leave_module(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if self.live.mixes:
            self.mixing[self.part] += self.live.work["operations"] - self.before

    def _leave(self, part: int, _module: Any, _inputs: Any, output: Any) -> None:
        output, *others = output if isinstance(output, tuple | list) else (output,)
        found = [each for each in tree_leaves(others) if isinstance(each, torch.Tensor) and each.requires_grad]
        self.returned[part] = sum(each.numel() * each.element_size() for each in found)
        if output.requires_grad:
            output.register_hook(self._hold)
        self.hidden = output.numel() * output.element_size()
        if part == len(self.layers):
            # A node is made before its operation.
            self.next, self.number = part + 1, torch._C._autograd._get_sequence_nr()
            self.last = weakref.ref(output.untyped_storage()), output.untyped_storage().nbytes()

    def _hold(self, gradient: torch.Tensor) -> None:
        """Hold the gradient of a layer's result until that of the layer before, as recomputation does: autograd then
        adds nothing to it in place."""
        self.gradient = gradient

    def _begin(self) -> None:
        """Begin the next part, if a module has."""
        if self.part == self.next:
            return
        self._end()
        self.part = self.next
        if self.part > len(self.layers):
            self.passed = self.last
        self.entered[self.part] = self.live.now
        self.live.restart()
        if torch.is_grad_enabled():
            self.numbers.append(self.number)

    def _begin_backward(self) -> None:
        """Begin the part before, if the node that is computed was made in it."""
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if number is None or number >= 2**63:  # one that accumulates a gradient has the largest
            return
        part = max(0, bisect_right(self.numbers, number) - 1)
        while self.back > part:
            self._left()
            self.back -= 1
            self.live.restart()
            self.started[self.back] = list(self.live.peaks)

    def _left(self) -> None:
        self.peaked[self.back] = list(self.live.peaks)
        self.works[self.back] = self.live.work
        self.live.work = dict.fromkeys(WORK, 0)


def _freed(storages: Iterable[tuple[Any, int]]) -> int:
    """Return the bytes of those that are no longer live."""
    return sum(size for storage, size in storages if storage() is None)


def _alone(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    _mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention by a fused kernel without a mask, as train/attention.py computes it."""
    functional = torch.nn.functional
    grouped = query.shape[1] != key.shape[1]
    attended = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2), None


AttentionInterface.register(ALONE, _alone)
AttentionMaskInterface.register(ALONE, lambda *_, **__: None)


def _grouped(first: torch.Tensor, second: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Return a grouped product of fake tensors in any type: torch knows its shape for bf16 alone, and CPUs compute it
    in fp32 too."""
    pair = (torch.empty_strided(each.shape, each.stride(), dtype=torch.bfloat16) for each in (first, second))
    result: torch.Tensor = torch.ops.aten._grouped_mm(*pair, *others, **named)
    return result.new_empty(result.shape, dtype=first.dtype)
