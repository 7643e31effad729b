"""zero.json: the options of a run's engine, and the choice of `render`. No other module reads or writes it."""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError

from zerolora.config.compared import compared
from zerolora.config.section import Section
from zerolora.config.settings import TrainingChoice
from zerolora.errors import UserError, shown
from zerolora.files import read_object, write_json
from zerolora.types import Precision

CHOICE = "zerolora"
"""Key of the file with the choice; all others are the engine's."""


class ZeroOptimization(Section):
    """The part of DeepSpeed's zero_optimization that training reads, with values converted as DeepSpeed does."""

    model_config = ConfigDict(extra="allow", strict=False, frozen=True)

    stage: int = 0
    zero_quantized_nontrainable_weights: bool = False
    offload_optimizer: dict[str, Any] | None = None

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer updates master weights on the host."""
        return bool((self.offload_optimizer or {}).get("device", "none") != "none")


class FsdpOptions(Section):
    """The options of torch's fully_shard (strategies/torch_native.py)."""

    mesh: list[int]
    reshard_after_forward: bool
    param_dtype: Precision
    reduce_dtype: Precision
    offload: bool


class EngineOptions(Section):
    """The options that training reads; the engine reads all."""

    model_config = ConfigDict(extra="allow", frozen=True)

    gradient_clipping: float
    zero_optimization: ZeroOptimization = ZeroOptimization()
    data_types: dict[str, Any] = Field(default_factory=dict)
    """The type in which DeepSpeed adds the gradients of micro-batches, if another than that of the weights."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    fsdp: FsdpOptions | None = None


class ZeroJson(Section):
    """results/<run>/zero.json."""

    options: dict[str, Any]
    """All options of the engine as in the file: a DeepSpeed config, or torch's options in a section."""
    choice: TrainingChoice

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return the content of a file. Raises ValidationError unless `render` can write it."""
        options = {name: value for name, value in values.items() if name != CHOICE}
        EngineOptions.model_validate(options)
        return cls(options=options, choice=TrainingChoice.model_validate(values.get(CHOICE)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the content of `path`. Raises UserError if the file is missing, or `render` cannot have written it."""
        values = read_object(path, "zerolora stage render")
        try:
            return cls.of(values)
        except ValidationError as error:
            mistake = error.errors()[0]
            within = [CHOICE] if error.title == TrainingChoice.__name__ else []
            key = ".".join(map(str, [*within, *mistake["loc"]]))
            missing = mistake["type"] == "missing" or (key == CHOICE and key not in values)
            wrong = "missing" if missing else f"{shown(mistake['input'])}, which `zerolora stage render` does not write"
            raise UserError(f"{path}: {key} is {wrong}; run `zerolora stage render` again") from None

    def leaving_out(self, expressions: list[str]) -> Self:
        """Return the same without the modules of these regular expressions (TrainingChoice.without_gradient)."""
        return self.model_copy(update={"choice": self.choice.model_copy(update={"without_gradient": expressions})})

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {**self.options, CHOICE: compared(self.choice)}

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.as_json())

    @cached_property
    def engine(self) -> EngineOptions:
        """The options that training reads."""
        return EngineOptions.model_validate(self.options)
