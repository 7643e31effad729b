"""Merge by hand: any base and adapters of peft's in directories of the user's, outside a pipeline."""

import math
from collections.abc import Sequence
from pathlib import Path

from zerolora.errors import UserError
from zerolora.files import staged_directory
from zerolora.log import result
from zerolora.merge.carried import carry, check_carried
from zerolora.merge.merge import write_model
from zerolora.methods.registry import OWN_FILES
from zerolora.model.base_check import check_weights
from zerolora.model.manifest import check_adapter_files, check_base_directory
from zerolora.units import byte_size


def merge_by_hand(
    base: Path, adapters: Sequence[Path], weights: Sequence[float], output: Path, dequantized: bool = False
) -> None:
    """Write the model that adapters, each times its weight, make of a base to a new directory.

    Without `weights` there is one adapter, as it is. Raises UserError if the base or an adapter is none that can be
    merged, or `output` is not free.
    """
    factors = _factors(adapters, weights)
    _check_base(base)
    _check_output(output, base)
    for adapter in adapters:
        if not adapter.is_dir():
            raise UserError(f"--adapter: {adapter}: there is no such directory; write that of an adapter")
        check_adapter_files(adapter, OWN_FILES)
        check_base_directory(adapter, base)
        check_carried(adapter, base)
    with staged_directory(output) as staged:
        write_model(base, list(zip(adapters, factors, strict=True)), staged, output, dequantized=dequantized)
        carry(adapters, base, staged)
    result(byte_size(sum(path.stat().st_size for path in output.iterdir())))


def _factors(adapters: Sequence[Path], weights: Sequence[float]) -> list[float]:
    if not weights and len(adapters) == 1:
        return [1.0]
    if len(weights) != len(adapters):
        raise UserError(
            f"--weight appears {len(weights)} times, and --adapter {len(adapters)} times; write a weight for each "
            "adapter, in the same order"
        )
    for weight in weights:
        if not math.isfinite(weight) or not weight:
            raise UserError(
                f"--weight: {weight:g} times an adapter is not a model, or the base itself; write another number, or "
                "leave the adapter out"
            )
    return list(weights)


def _check_base(base: Path) -> None:
    try:
        check_weights(base)
    except UserError as error:
        raise UserError(f"--base: {error}") from None


def _check_output(output: Path, base: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        pass
    elif output.exists() or output.is_symlink():
        raise UserError(f"--output: {output}: exists already; write another directory, or remove this one")
    if output.resolve().is_relative_to(base.resolve()):
        raise UserError(f"--output: {output}: is inside the base {base}; write a directory outside of it")
