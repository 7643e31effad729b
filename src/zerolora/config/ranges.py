"""A range of numbers that a search draws from."""

from pydantic import model_validator

from zerolora.config.section import Section


class Range(Section):
    """Numbers from `low` to `high`, both included: whole ones, if all that is written is whole."""

    low: int | float
    """Least value."""
    high: int | float
    """Greatest value."""
    log: bool = False
    """Draw from the logarithms, as for learning rates."""
    step: int | float | None = None
    """Distance of the values, counted from `low`. Default: 1 for whole numbers, none for others."""

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return all(isinstance(each, int) for each in (self.low, self.high, self.step) if each is not None)

    @model_validator(mode="after")
    def _has_values(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; write the lower one as low")
        if self.log and self.low <= 0:
            raise ValueError(f"low {self.low} has no logarithm; write more than 0, or log: false")
        if self.log and self.step is not None:
            raise ValueError("step and log exclude each other; write one of them")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step {self.step} is not between 0 and high - low; write one that is")
        return self
