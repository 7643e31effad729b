"""Conversions of a fetched model to one that is trained: of a published layout to a Llama, and of quantized weights to
bf16, once or each time that they are loaded.

A killed one is resumed: its complete files of weights stay in a directory beside the target, and are used if the source
is the same.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zerolora.errors import UserError
from zerolora.fetch import dequantize, llama_conversion
from zerolora.files import read_object, staged_directory, write_json
from zerolora.model import foreign
from zerolora.model.base_check import check_base, check_settings
from zerolora.model.manifest import model_files
from zerolora.model.quantized.formats import FORMATS
from zerolora.model.weight_files import weight_files

SOURCE = "source.json"
"""In an unfinished conversion: which it is, and sizes and dates of the files that it reads."""


@dataclass(frozen=True)
class Conversion:
    """A conversion: its settings, and all of it."""

    name: str
    is_of: Callable[[Path], bool]
    """Return whether the model in a directory needs it."""
    settings: Callable[[Path, Path], None]
    """Write the small files of the model in the first directory to the second."""
    whole: Callable[[Path, Path], None]
    """Write all files; those of weights that are there are kept, if it can."""


# The first that a model needs is made. A model that needs both is refused by llama_layouts.py.
CONVERSIONS = (
    Conversion(
        "layout",
        llama_conversion.needs_conversion,
        llama_conversion.convert_settings,
        llama_conversion.convert,
    ),
    Conversion("on_fetch", dequantize.is_quantized, dequantize.convert_settings, dequantize.convert),
)


# Of a quantized model, with dequantize: on_load.
ON_LOAD = Conversion("on_load", dequantize.is_quantized, dequantize.keep_settings, dequantize.keep)


def conversion_of(directory: Path, on_load: bool = False) -> Conversion | None:
    """Return the conversion that the model in a directory needs, if any. With `on_load`, raises UserError unless its
    weights are quantized."""
    if on_load:
        if not ON_LOAD.is_of(directory):
            raise UserError(
                f"{directory / foreign.CONFIG}: dequantize is on_load, and the weights are not quantized in a format "
                f"that is dequantized ({', '.join(FORMATS)}); remove dequantize"
            )
        return ON_LOAD
    return next((each for each in CONVERSIONS if each.is_of(directory)), None)


def convert(conversion: Conversion, directory: Path, target: Path) -> None:
    """Write the model in `directory`, converted and checked, to the directory `target`, atomically."""
    unfinished = target.with_name(f".{target.name}.converting")
    with _errors_of(directory, unfinished):
        read = {path.name: path.stat() for path in [directory / foreign.CONFIG, *weight_files(directory)]}
        source = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in read.items()}
        record, begun = unfinished / SOURCE, {"conversion": conversion.name, "files": source}
        if not record.is_file() or read_object(record, "zerolora stage fetch") != begun:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write_json(record, begun)
        try:
            conversion.whole(directory, unfinished)
            model_files(unfinished)
            check_base(unfinished)
        except UserError:  # the next attempt would end the same
            shutil.rmtree(unfinished)
            raise
    with staged_directory(target) as staged:
        record.unlink()
        for path in unfinished.iterdir():
            path.replace(staged / path.name)
    unfinished.rmdir()


def check_converted_settings(conversion: Conversion, directory: Path, target: Path) -> None:
    """Raise UserError as `check_settings` for the model that `directory` is converted to, whose small files are written
    to `target`."""
    with _errors_of(directory, target):
        shutil.rmtree(target, ignore_errors=True)
        conversion.settings(directory, target)
        check_settings(target)


@contextmanager
def _errors_of(source: Path, target: Path) -> Iterator[None]:
    """Name the files of `source`, which the user knows, in errors of the converted ones in `target`."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(target), str(source))) from None
