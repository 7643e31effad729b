"""notes: the config of a made-up tool."""

from zerolora.imports.formats.import_format import Format, number, same, text

RULES = {
    "base": same("fetch.directory", text),
    "rows_file": same("prepare.rows.path", text),
    "rate": same("train.learning_rate", number),
}
FORMAT = Format(
    name="notes",
    title="Notes 1.0",
    needed="rows_file",
    shared={},
    own=RULES,
    defaults={},
    finish=lambda draft: [],
)
