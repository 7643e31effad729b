"""What each fine-tuning method trains of a model, and what the frozen rest weighs.

Sources: LoRA arXiv 2106.09685 section 4.1, DoRA arXiv 2402.09353, (IA)³ arXiv 2205.05638, QLoRA arXiv 2305.14314
section 3; which modules a name means and what is trained of them: peft/tuners/*/model.py and layer.py.
"""

import functools
import re
from dataclasses import dataclass
from typing import Literal

from zerolora.errors import UserError, shown
from zerolora.memory.model_spec import ModelSpec, Module, expert_adapter_parameters
from zerolora.types import Method

ADAPTABLE = ("linear", "conv1d", "embedding", "head")
# peft/utils/constants.py, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING: keys, values, and the MLP's last input.
IA3_TARGETS = ("k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "k", "v")
IA3_FEEDFORWARD = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "wo")
# bitsandbytes: one absmax a block in fp32; double quantization keeps those as int8 with an fp32 a second block, a
# mean, and their table of 256 numbers (QLoRA section 3, bitsandbytes/functional.py quantize_4bit).
BLOCK, SECOND_BLOCK, CODE = 64, 256, 16


@dataclass(frozen=True)
class Finetuning:
    """How a model is fine-tuned."""

    method: Method = "lora"
    r: int = 8
    """Rank of LoRA, DoRA and QLoRA."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear, or names or ends of paths of modules."""
    dropout: float = 0.0
    """Dropout before the first factor."""
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Other ranks for modules by name, path or regular expression, as peft's rank_pattern."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a whole copy is trained and saved."""
    quantization: Literal["nf4", "fp4"] = "nf4"
    """QLoRA's 4-bit type; both take the same room."""
    double_quantization: bool = True
    """QLoRA's second quantization, of the constants of the first."""
    block: int = BLOCK
    """Weights of one quantization constant."""


@dataclass(frozen=True)
class Weights:
    """What of a model is frozen and what is trained."""

    frozen: int
    """Parameters that are not trained."""
    trained: int
    """Parameters that are: φ."""
    frozen_bytes: float
    """Bytes of the frozen ones, quantized or not, whole."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module, of the first layer where layers differ; 1 for (IA)³."""
    largest_trained: int
    """Parameters of the largest trained tensor."""
    tensors: int
    """How many tensors are trained."""


@functools.lru_cache(maxsize=64)
def weights(shape: ModelSpec, how: Finetuning, width: int) -> Weights:
    """Return what a method freezes and trains; `width` is the bytes of an unquantized weight.

    Raises UserError if a name is in no module.
    """
    if how.method == "full":
        largest = max(size for module in shape.modules for size in _sizes(module))
        count = sum(len(module.weights) * module.count for module in shape.modules)
        return Weights(0, shape.parameters, 0.0, (), largest, count)
    adapted = _targets(shape, how)
    saved = _named(shape, how.modules_to_save, "modules_to_save", shape.modules) if how.modules_to_save else []
    tensors: list[int] = []
    ranks: dict[str, int] = {}
    for module in adapted:
        for layer in range(module.count):
            path = module.path.format(layer)
            r = _rank(path, how)
            ranks.setdefault(module.path, r)
            tensors += _adapter(module, r, how.method)
    if how.targets == "all-linear" and how.method != "ia3" and (experts := expert_adapter_parameters(shape, how.r)):
        tensors.append(experts)
    for module in saved:
        sizes = _sizes(module) or [shape.vocabulary * shape.hidden]  # a tied head is saved whole, apart from its tie
        tensors += sizes * module.count
    frozen_bytes = float(shape.parameters * width)
    if how.method == "qlora":
        quantized = sum(module.inputs * module.outputs * module.count for module in shape.linears)
        frozen_bytes += quantized * (_quantized_bytes(how) - width)
    return Weights(shape.parameters, sum(tensors), frozen_bytes, tuple(ranks.items()), max(tensors), len(tensors))


def _adapter(module: Module, r: int, method: Method) -> list[int]:
    """Return the sizes of the tensors that a method adds to one copy of a module."""
    inputs, outputs = (module.inputs, module.outputs) if module.inputs else module.weights[0][1]
    if method == "ia3":
        return [inputs if module.path.endswith(IA3_FEEDFORWARD) else outputs]
    return [inputs * r, outputs * r] + ([outputs] if method == "dora" else [])


def _quantized_bytes(how: Finetuning) -> float:
    """Return the bytes of one 4-bit weight with its share of the constants."""
    if not how.double_quantization:
        return 0.5 + 4 / how.block
    return 0.5 + 1 / how.block + 4 / (how.block * SECOND_BLOCK)


def _targets(shape: ModelSpec, how: Finetuning) -> list[Module]:
    if how.method == "ia3" and how.targets == "all-linear":
        return [module for module in shape.linears if module.path.endswith(IA3_FEEDFORWARD) or _is(module, IA3_TARGETS)]
    if how.targets == "all-linear":
        return list(shape.linears)
    names = (how.targets,) if isinstance(how.targets, str) else how.targets
    adaptable = tuple(module for module in shape.modules if module.kind in ADAPTABLE)
    return _named(shape, names, "train.lora.targets", adaptable)


def _named(shape: ModelSpec, names: tuple[str, ...], key: str, among: tuple[Module, ...]) -> list[Module]:
    """Return the modules whose name, or end of path, is one of `names`."""
    for name in names:
        if not any(_is(module, (name,)) for module in among):
            known = ", ".join(sorted({module.name for module in shape.linears}))
            raise UserError(f"{key}: {shown(name)} is not in the model; write all-linear or some of {known}")
    return [module for module in among if _is(module, names)]


def _is(module: Module, names: tuple[str, ...]) -> bool:
    return any(module.path == name or module.path.endswith(f".{name}") for name in names)


def _rank(path: str, how: Finetuning) -> int:
    """Return r of a module (peft/utils/other.py, get_pattern_key)."""
    for key, r in how.rank_pattern:
        if re.fullmatch(rf"(.*\.)?({key})", path):
            return r
    return how.r if how.method != "ia3" else 1


def _sizes(module: Module) -> list[int]:
    sizes = []
    for _, shape in module.weights:
        size = 1
        for extent in shape:
            size *= extent
        sizes.append(size)
    return sizes
