"""The well-known prompt formats that `prepare.template` may name, one file each.

To add a format, write a file here that defines `FORMAT` (base.py). The config, its JSON Schema and the table of
docs/data.md find it by its file. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil

from zerolora.data.prompt_formats.definition import PromptFormat


def _registered() -> dict[str, PromptFormat]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    formats = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {each.name: each for each in sorted(formats, key=lambda each: str(each.name))}


PROMPT_FORMATS = _registered()
"""Every prompt format by name."""


def table() -> str:
    """Return the table of docs/data.md: an exchange in each format, the tokens that it needs, and its source."""
    lines = ["| template | Hi and Hello | tokens it needs | as in |", "|---|---|---|---|"]
    for name, each in PROMPT_FORMATS.items():
        example = each.example.replace("\n", "⏎").replace("|", "\\|")
        tokens = ", ".join(f"`{token}`" for token in each.tokens).replace("|", "\\|") or "none"
        lines.append(f"| `{name}` | `{example}` | {tokens} | {each.source} |")
    return "\n".join(lines)
