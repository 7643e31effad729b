"""Constructors of modules, by kind."""

from zerolora.model.spec import Module


def linear(path: str, inputs: int, outputs: int, bias: bool = False, count: int = 1) -> Module:
    return Module(path, "linear", weight_shapes((outputs, inputs), outputs if bias else 0), count, inputs, outputs)


def conv1d(path: str, inputs: int, outputs: int, count: int) -> Module:
    # GPT-2's linear modules, with a weight of [inputs, outputs].
    return Module(path, "conv1d", weight_shapes((inputs, outputs), outputs), count, inputs, outputs)


def embedding(path: str, rows: int, width: int) -> Module:
    return Module(path, "embedding", weight_shapes((rows, width)))


def rms(path: str, width: int, count: int = 1) -> Module:
    return Module(path, "norm", weight_shapes((width,)), count)


def layer_norm(path: str, width: int, count: int = 1) -> Module:
    return Module(path, "norm", weight_shapes((width,), width), count)


def head(inputs: int, vocabulary: int, tied: bool) -> Module:
    weights = () if tied else weight_shapes((vocabulary, inputs))
    return Module("lm_head", "head", weights, 1, inputs, vocabulary)


def weight_shapes(size: tuple[int, ...], bias: int = 0) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("weight", size), ("bias", (bias,))) if bias else (("weight", size),)


def replaced(modules: tuple[Module, ...], part: str, others: tuple[Module, ...]) -> tuple[Module, ...]:
    """Return `modules` with `others` instead of those whose path contains `part`."""
    at = next(index for index, module in enumerate(modules) if part in module.path)
    rest = tuple(module for module in modules if part not in module.path)
    return rest[:at] + others + rest[at:]
