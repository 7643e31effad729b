"""Stage export: makes one target of a run, opens it again, and lets it answer three held-out rows.

zerolora export --target gguf --settings JSON --model resources/models/MODEL --weights resources/weights/MODEL.json
                --adapter results/NAME/adapter --merged results/NAME/merged/manifest.json
                --data results/data/NAME --output results/NAME/export/gguf
"""

from pathlib import Path
from typing import Any

from zerolora.config.section import Section
from zerolora.data.rows import open_split
from zerolora.export import opened
from zerolora.export.modelfile import stop_tokens
from zerolora.export.targets import TARGETS
from zerolora.export.targets.base import Opened, RunResult
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.units import byte_size

ROWS = 3
ANSWER_TOKENS = 32
UNPROMPTED = 8
"""Tokens of a row without a prompt that stand for one."""


def export(target: str, settings: Section, source: RunResult, data: Path, output: Path) -> None:
    """Write `target` and its manifest to directory `output`.

    Raises UserError for what the target cannot hold, before anything is written, and if what was written cannot be
    opened.
    """
    kind = TARGETS[target]
    kind.check(source, settings)
    with staged_directory(output) as staged:
        found = kind.run(source, settings, staged)
        checked = loaded_check(kind.opened(source, settings, staged), source.merged, data)
        files = describe(staged)
        manifest = {"target": target, "settings": settings.model_dump(mode="json"), "files": files}
        write_json(staged / MANIFEST, manifest | found | {"loaded": checked})
    size = byte_size(sum(file["bytes"] for file in files.values()))
    same = f", {checked['equal']} of {len(checked['rows'])} answers equal" if checked["rows"] else ""
    result(f"{size}, opened by {checked['opened_by']}{same}")


def loaded_check(exported: Opened, merged: Path, data: Path) -> dict[str, Any]:
    """Return who opened what was exported, and its answers to held-out rows beside those of the merged model.

    `agreement` is the share of the merged model's tokens before the first that differs, over all rows. Where the
    library computes nothing, there are no answers.
    """
    record: dict[str, Any] = {"opened_by": exported.library, **exported.found, "rows": [], "equal": 0}
    if exported.answer is None:
        return record
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(merged, local_files_only=True, trust_remote_code=False)
    model = opened.model_of(merged)
    original, stops = opened.answering(model, "transformers").answer, stop_tokens(model.generation_config)
    assert original is not None
    same = total = 0
    held_out = open_split(data, "test")
    for row in held_out.select(range(min(ROWS, len(held_out)))):
        prompt = row["input_ids"][: row["prompt"] or UNPROMPTED]
        expected, answer = (each(prompt, ANSWER_TOKENS, stops) for each in (original, exported.answer))
        pairs = list(zip(expected, answer, strict=False))
        same += next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
        total += len(expected)
        texts = {name: tokenizer.decode(ids) for name, ids in (("merged", expected), ("exported", answer))}
        record["rows"].append(texts | {"equal": expected == answer})
    return record | {"equal": sum(row["equal"] for row in record["rows"]), "agreement": same / max(total, 1)}
