"""Chat templates that another tool has by name, and a model has itself: `prepare` compares their texts."""

from zerolora.imports.formats.import_format import CHANGES, NO_EFFECT, Draft, Remark

COMPARED = Remark("chat is written, and `prepare` stops if the model's own chat template writes other text", NO_EFFECT)
"""The line of a template whose texts are known."""


def compare(written: list[str], draft: Draft) -> list[str]:
    """Set template: chat, with the texts of the tool's template; return a line if they do not hold."""
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    rows["template"] = "chat"
    if "template_arguments" in rows:
        text = "prepare.rows.template: compare the text of the model's own chat template with these arguments"
        return [Remark(text, CHANGES)]
    rows["template_writes"] = written
    return []
