"""The machine that computed a result, in a line: for statements, the card and `zerolora rebuild`."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from zerolora.files import canonical
from zerolora.json_kinds import JsonObject, Null, Text, Whole


class MachineKeys(JsonObject):
    """A machine as `zerolora.machine.identity.computing` has it."""

    processor: Text = ""
    kernels: Text = ""
    torch: Text = ""
    gpus: list[Annotated[list[Text | Whole], Field(min_length=1)]] = Field([])
    """Name and compute capability of each."""
    driver: Text | Null = None


def in_words(machine: str | Mapping[str, Any]) -> str:
    """Return a checked machine in a line, as in `AMD EPYC, AVX512 kernels, torch 2.13.0+cpu, no GPU`; a key of another
    program's with its name."""
    if isinstance(machine, str) or not machine:
        return str(machine or "") or "a machine of unknown kind"
    rest = dict(machine)
    parts = [rest.pop("processor", "")]
    kernels, comma, libraries = rest.pop("kernels", "").partition(", ")
    parts.append(f"{kernels} kernels{comma}{libraries}" if kernels else "")
    parts += [f"torch {torch}" if (torch := rest.pop("torch", "")) else ""]
    gpus = Counter(str(each[0]) for each in rest.pop("gpus", []))
    parts += [name if number == 1 else f"{number} × {name}" for name, number in sorted(gpus.items())] or ["no GPU"]
    parts += [f"driver {driver}" if (driver := rest.pop("driver", None)) else ""]
    parts += [f"{name} {canonical(value)}" for name, value in sorted(rest.items())]
    return ", ".join(part for part in parts if part)
