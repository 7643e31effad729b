"""Trained rows of embedding and head for added tokens, in peft's format (LoraConfig.trainable_token_indices).

Source: peft/tuners/trainable_tokens/layer.py. The trained rows replace the base model's; tied embedding and head share
them.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.methods.method import SHARED, Update, check_apart, is_named
from zerolora.methods.peft_format import PREFIX, table_paths
from zerolora.tensor_file import rows_of

if TYPE_CHECKING:
    import torch

    from zerolora.model.spec import ModelSpec, Module
    from zerolora.tensor_file import Factor

SUFFIX = ".token_adapter.trainable_tokens_delta"
INDICES = "trainable_token_indices"


def row_options(model: Any, numbers: Iterable[int], modules_to_save: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of LoraConfig for training rows of a model's embedding and head.

    Raises UserError if modules_to_save has one of the two, or if the head has a bias, which peft ignores with trained
    rows.
    """
    from zerolora.compat.peft_patches import gather_rows_anywhere

    rows = list(numbers)
    if not rows:
        return {}
    check_head(model.get_output_embeddings().bias is not None)
    paths, whole = table_paths(model), tuple(modules_to_save)
    check_apart("train.lora.modules_to_save", [path for path in paths if path.endswith(whole)])
    gather_rows_anywhere()
    return {INDICES: {path: rows for path in paths if path != _tied(model)}}


def check_targets(model: Any, config: Any) -> None:
    """Raise UserError if a LoraConfig adapts an embedding or a head whose rows it trains."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.trainable_token_indices and config.target_modules != "all-linear":
        adapted = [path for path in table_paths(model) if check_target_module_exists(config, path)]
        check_apart("train.lora.targets", adapted)


def row_tensors(
    model: "ModelSpec", tokens: int, adapted: "Iterable[Module]", modules_to_save: tuple[str, ...]
) -> list[int]:
    """Return the elements of the trained rows for `tokens` tokens, of the embedding and of an untied head.

    `adapted`: modules with an adapter. Raises UserError if embedding or head is trained in another way too, or if the
    head has a bias.
    """
    if not tokens:
        return []
    tables = [each for each in model.modules if each.kind in SHARED]
    check_apart("train.lora.targets", [each.path for each in tables if each in adapted])
    check_apart("train.lora.modules_to_save", [each.path for each in tables if each.path.endswith(modules_to_save)])
    check_head(any(name == "bias" for each in tables for name, _ in each.weights))
    shapes = [shape for each in tables for _, shape in each.weights]
    return [tokens * shape[1] for shape in shapes if shape[0] == model.vocabulary]


def check_head(biased: bool) -> None:
    """Raise UserError if the head has a bias."""
    if biased:
        raise UserError(
            "prepare: add_tokens and add_special_tokens: this model's head has a bias, with which peft cannot train "
            "rows; set method: full, or leave the tokens out"
        )


def row_update(
    name: str, tensor: "Factor", config: dict[str, Any], model: Any, names: Container[str]
) -> dict[str, Update]:
    """Return the updates of an adapter's tensor of trained rows; `names` are those of all tensors. A tied head has the
    embedding's rows unless it has its own (peft/utils/other.py, set_additional_trainable_modules)."""
    path, listed = name.removeprefix(PREFIX).removesuffix(SUFFIX), config[INDICES]
    if isinstance(listed, dict):  # by the end of a path; a list is of the embedding
        listed = next(rows for end, rows in listed.items() if is_named(path, (end,)))
    result: dict[str, Update] = {f"{path}.weight": Rows(f"{path}.weight", tuple(listed), tensor)}
    head = _tied(model)
    if head and head != path and f"{PREFIX}{head}{SUFFIX}" not in names:
        # A checkpoint may contain the shared weight twice.
        result[f"{head}.weight"] = Rows(f"{head}.weight", tuple(listed), tensor, optional=True)
    return result


@dataclass(frozen=True)
class Rows(Update):
    """Replaces some rows of a weight by trained ones."""

    weight: str
    numbers: tuple[int, ...]
    trained: "Factor"
    """[rows, width]"""
    optional: bool = False
    """Whether it is a tied head, of which few checkpoints have a copy."""

    def check(self, shape: tuple[int, ...]) -> None:
        if shape[1] != self.trained.shape[1] or shape[0] <= max(self.numbers):
            raise UserError(
                f"{self.weight} is {list(shape)} in the base, and the adapter has rows up to "
                f"{max(self.numbers)} of width {self.trained.shape[1]}: "
                f"{'the widths differ' if shape[1] != self.trained.shape[1] else 'the base has too few rows'}; use "
                "the base that the adapter was trained on, with its vocabulary"
            )

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        for index, number in enumerate(self.numbers):
            if first <= number < first + len(rows):
                rows[number - first] = rows_of(self.trained, index, index + 1)[0]


def _tied(model: Any) -> str | None:
    """Return the path of a tied head; None for an untied one."""
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        return None
    path: str = next(name for name, module in model.named_modules() if module is head)
    return path
