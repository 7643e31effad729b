"""The interface of a training method: trained parameters, their memory, and the trace of the forward pass."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolora.config.section import Fault
from zerolora.errors import UserError, shown
from zerolora.model.spec import ModelSpec, Module
from zerolora.tensor_file import Factor, StoredTensor, equal

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.tracer import Value

WHOLE_WEIGHTS = "model.safetensors"
"""The output file of a method without an adapter."""
ADAPTABLE = ("linear", "conv1d", "embedding", "head")
SHARED = ("embedding", "head")
"""Modules that share one weight in a tied model."""


@dataclass(frozen=True)
class TrainedParameters:
    """The frozen and trained parameters of a model."""

    frozen: int
    trained: int
    """φ."""
    frozen_bytes: float
    """Bytes of the frozen parameters, quantized or not, unsharded."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module, in the first layer if layers differ; 1 for (IA)³."""
    largest_trained: int
    """Parameters of the largest trained tensor."""
    factored: int
    """Rows and columns of the trained matrices, and elements of trained vectors, each with a value in Adafactor."""
    constants: float = 0.0
    """Of `frozen_bytes`: the constants of quantized weights, which no engine shards or offloads."""


@dataclass(frozen=True)
class Method(ABC):
    """A way to train a model. Its fields are its settings."""

    name: ClassVar[str]
    trains: ClassVar[bool] = False
    """Whether `zerolora stage train` can run it; otherwise only its memory is estimated."""
    trains_base: ClassVar[bool] = False
    """Whether the base model's weights are trained."""
    rate: ClassVar[float] = 1.0
    """The default learning rate over that of LoRA."""

    @property
    def frozen_type(self) -> str | None:
        """The quantized type of the frozen linear modules; None if they are not quantized."""
        return None

    @property
    def unpacks(self) -> bool:
        """Whether it needs the unpacked weights of quantized modules outside of their forward pass."""
        return False

    @property
    def reads_whole(self) -> bool:
        """Whether each rank must read a quantized base model whole before it keeps its part."""
        return False

    @property
    def drops(self) -> bool:
        """Whether dropout is applied to the adapter's input."""
        return False

    @property
    def rows(self) -> int:
        """Trained rows of an otherwise frozen embedding, and of an untied head."""
        return 0

    @classmethod
    def of(cls, settings: "MethodSections") -> Self:
        """Return the method with the settings of `train` that memory depends on."""
        return cls()

    def under(self, engine: str) -> "Method":
        """Return the method under an engine, which may convert weights."""
        return self

    def activation_width(self, width: int) -> int:
        """Return the bytes of an activation; `width` is a weight's in the run's precision."""
        return width

    @abstractmethod
    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the trained and frozen parameters; `width` is the bytes of an unquantized weight.

        Raises UserError if a setting names a module that the model lacks.
        """

    def packed(self, module: "Module", width: int) -> float:
        """Return a module's weights as a number of weights of `width` bytes, without constants: fewer if quantized."""
        return float(module.parameters)

    @property
    def unpacks_experts(self) -> bool:
        """Whether the weights of a layer's experts are unpacked while it computes."""
        return False

    def replaced(self, model: "ModelSpec") -> int:
        """Return the parameters of the base model that a rank replaces by another form than stored."""
        return 0

    @abstractmethod
    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a linear module with the method's adapter; `role` is a key of projections.ROLES."""


@dataclass(frozen=True)
class TrainableMethod(Method):
    """A method that `zerolora stage train` can run and `zerolora merge` can merge."""

    trains: ClassVar[bool] = True
    sections: ClassVar[tuple[str, ...]] = ()
    """The sections of `train` with its settings."""
    trains_rows: ClassVar[bool] = True
    """Whether it can train the rows of added tokens."""
    quantized_form: ClassVar[str | None] = None
    """The method that trains the same on a quantized base, if any."""
    peft_type: ClassVar[str | None] = None
    """peft_type of its adapter_config.json; None if its output is not an adapter."""
    options: ClassVar[dict[str, Any]] = {}
    """Arguments of peft's config that are the same for every adapter of the method."""
    meaning: ClassVar[Mapping[str, str]] = {}
    """The other keys of peft's config that decide what the tensors mean, with ours: {"r": "lora.r"}."""

    @classmethod
    def quantizes(cls) -> bool:
        """Return whether the base model is quantized."""
        return "quantization" in cls.sections

    @classmethod
    def identity(cls, settings: "MethodSections", published: bool = False) -> dict[str, Any]:
        """Return the values of `meaning` for the adapter that a run builds; with `published`, for the one that it
        saves. A run can load the adapter of another only if they are equal."""
        keys = {key: path.split(".") for key, path in cls.meaning.items()}
        return {key: getattr(getattr(settings, section), name) for key, (section, name) in keys.items()}

    @classmethod
    def faults(cls, settings: "MethodSections") -> Iterator[Fault]:
        """Yield each setting that the method does not support, by its path below `train`."""
        yield from ()

    @staticmethod
    @abstractmethod
    def build(model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        """Return a transformers model with the trained parameters added, and all others frozen.

        `rows`: indices of the trained rows of embedding and head, for added tokens. Raises UserError if a setting names
        a module that the model lacks.
        """

    @classmethod
    def fits_listed(cls, settings: "MethodSections", model: ModelSpec) -> bool:
        """Return whether `build` and `updates_of` accept every base with the weights of this spec, so that render need
        not build its class (probe/listed_trial.py). Raises UserError if a setting names a module that the model lacks.
        """
        return False

    @staticmethod
    @abstractmethod
    def published(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the tensors to save, from the trained parameters by their names in a built model."""

    @staticmethod
    @abstractmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        """Return whether a published tensor has its initial value."""

    @staticmethod
    @abstractmethod
    def updates(directory: Path, model: Any) -> "dict[str, Update]":
        """Return the updates of a directory of trained weights by the name of each weight in `model`, the base on the
        meta device, or its spec for an adapter of plain modules (merge/listed.py).

        Raises UserError if a tensor is not of this method.
        """

    @staticmethod
    @abstractmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> "dict[str, Update]":
        """Return the updates of published tensors and the content of their adapter_config.json, {} without one."""


class Update(ABC):
    """The change of one weight in training. Its tensors are in memory, or in a file that is read in part."""

    optional: bool = False
    """Whether the base model may lack the weight."""

    @property
    def by_rows(self) -> bool:
        """Whether each row of the result depends on that row of the weight alone."""
        return True

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UserError unless the trained weight has this shape."""

    @abstractmethod
    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Update fp32 `rows` in place, of which `first` is the first's index; the whole weight unless `by_rows`."""

    def applied(self, weight: "torch.Tensor") -> "torch.Tensor":
        """Return the trained fp32 weight from the base's. Raises UserError if the shapes differ."""
        import torch

        self.check(tuple(weight.shape))
        result = weight.to(torch.float32, copy=True)
        self.apply(result, 0)
        return result


def check_shape(name: str, shape: tuple[int, ...], expected: "Iterable[int]") -> None:
    """Raise UserError if the adapter expects another shape of a base weight."""
    expected = tuple(expected)
    if shape == expected:
        return
    if len(shape) == len(expected):
        differing = [index for index, (one, other) in enumerate(zip(shape, expected, strict=True)) if one != other]
        what = "their sizes differ" if len(differing) > 1 else f"the sizes of dimension {differing[0]} differ"
    else:
        what = "one has more dimensions"
    raise UserError(
        f"{name} is {list(shape)} in the base and {list(expected)} in the adapter: {what}; use the base that the "
        "adapter was trained on"
    )


def named_modules(model: "ModelSpec", names: tuple[str, ...], key: str, among: "Iterable[Module]") -> "list[Module]":
    """Return the modules whose path is, or ends in, one of `names`; `key` is the setting in messages."""
    among = list(among)
    for name in names:
        if not any(is_named(module.path, (name,)) for module in among):
            known = ", ".join(sorted({module.name for module in model.linears}))
            raise UserError(f"{key}: {shown(name)} is not in the model; choose from {known}")
    return [module for module in among if is_named(module.path, names)]


def is_named(path: str, names: Iterable[str]) -> bool:
    """Return whether a module's path is, or ends in, one of `names`."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def saved_tensors(model: "ModelSpec", names: tuple[str, ...]) -> list[int]:
    """Return the elements of each parameter of modules_to_save."""
    tensors: list[int] = []
    for name in names:
        if not any(module.path.endswith(name) for module in model.modules):
            known = ", ".join(sorted({module.name for module in model.modules}))
            raise UserError(f"modules_to_save: {shown(name)} is not in the model; choose from {known}")
    # As in peft, also in the middle of a name: norm means input_layernorm too (utils/other.py, _set_trainable).
    saved = [module for module in model.modules if module.path.endswith(names)]
    check_untied(model.tied, "modules_to_save", [module.path for module in saved if module.kind in SHARED])
    for module in saved:
        # A tied head is saved as a tensor of its own.
        tensors += (sizes(module) or [model.vocabulary * model.hidden]) * module.count
    return tensors


def check_apart(key: str, paths: Iterable[str]) -> None:
    """Raise UserError for an embedding or a head, `paths`, that `key` trains beside its rows for added tokens."""
    for path in paths:
        raise UserError(
            f"{key}: {path} would be trained twice, since rows of it are trained for the tokens that prepare adds; "
            "leave it out"
        )


def check_untied(tied: bool, key: str, paths: list[str]) -> None:
    """Raise UserError for a tied model's embedding or head, `paths`, that would be trained by itself: merged, the two
    would no longer be equal."""
    if tied and paths:
        raise UserError(
            f"{key}: {paths[0]} shares its weight with another module of this model, and training does not "
            "change one of the two by itself; leave it out"
        )


def saved_factors(model: "ModelSpec", names: tuple[str, ...]) -> int:
    """Return the rows and columns of modules_to_save."""
    total = 0
    for module in model.modules:
        if module.path.endswith(names):
            shapes = [shape for _, shape in module.weights] or [(model.vocabulary, model.hidden)]
            total += sum(rows_and_columns(shape) for shape in shapes) * module.count
    return total


def rows_and_columns(shape: tuple[int, ...]) -> int:
    """Return the rows and columns of a matrix, or of each of a stack, or the elements of a vector."""
    return math.prod(shape) if len(shape) < 2 else math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def sizes(module: "Module") -> list[int]:
    """Return the number of elements by parameter, for one copy of a module."""
    return [math.prod(shape) for _, shape in module.weights]


def tied_weights(model: Any) -> dict[str, str]:
    """Return the name of each shared weight by its copy's name, mostly the head's. `model` is on the meta device, or a
    spec."""
    if not isinstance(model, ModelSpec):
        return dict(model.all_tied_weights_keys)
    if not model.tied:
        return {}
    head = next(each for each in model.modules if each.kind == "head")
    tables = (each for each in model.modules if each.kind == "embedding")
    result = [each for each in tables if dict(each.weights)["weight"] == (model.vocabulary, head.inputs)]
    return {f"{head.path}.weight": f"{result[0].path}.weight"} if result else {}


def without_copies(path: Path, tensors: Mapping[str, StoredTensor], tied: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return the tensors of the file `path` without copies of shared weights, which other tools store; `tied` maps each
    copy's name to the weight's. Raises UserError if the two differ."""
    for copy, name in tied.items():
        if copy in tensors and name in tensors and not equal(tensors[copy], tensors[name]):
            raise UserError(
                f"{path}: {copy} and {name} differ, and the base shares one weight between them; save the weights with "
                "one of them, or use a base with tie_word_embeddings: false"
            )
    return {name: each for name, each in tensors.items() if tied.get(name) not in tensors}
