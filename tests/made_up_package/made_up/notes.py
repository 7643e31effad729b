"""notes: the config of a made-up tool."""

from zerolora.imports.formats.import_format import Draft, Format, number, same, text
from zerolora.imports.formats.shared.base_model_keys import MODEL, model
from zerolora.imports.formats.shared.scaffold import scaffold

RULES = {
    "base": MODEL,
    "rows_file": same("prepare.rows.path", text),
    "rate": same("train.learning_rate", number),
}


def _finish(draft: Draft) -> list[str]:
    """Set the model of the rows, and what no file of this tool contains."""
    name, lines = model("base", draft)
    draft.set("prepare.rows.model", name)
    return lines + scaffold(draft)


FORMAT = Format(
    name="notes",
    title="Notes 1.0",
    needed="rows_file",
    shared={},
    own=RULES,
    defaults={},
    finish=_finish,
)
