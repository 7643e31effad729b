"""Stage export: write one target of a run, open it, and compare its answers to three held-out rows.

zerolora export --target gguf --settings JSON --model resources/models/MODEL --weights resources/weights/MODEL.json
                --adapter results/NAME/adapter --merged results/NAME/merged/manifest.json
                --data results/data/NAME --output results/NAME/export/gguf
"""

from pathlib import Path
from typing import Any

from zerolora.config.section import Section
from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError
from zerolora.export import opened
from zerolora.export.targets import TARGETS
from zerolora.export.targets.target import ExportTarget, RunResult
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.methods.registry import check_published
from zerolora.model.architecture import tokenizer_of
from zerolora.model.prompt_format import stop_tokens
from zerolora.units import byte_size

ROWS = 3
ANSWER_TOKENS = 32
UNPROMPTED = 8
"""First tokens of a row without a prompt, used as its prompt."""


def export(target: str, settings: Section, source: RunResult, output: Path) -> None:
    """Write `target` and its manifest to directory `output`.

    Raises UserError, before anything is written, if the target does not support the model, and if its files cannot be
    opened afterwards.
    """
    kind = TARGETS[target]
    if kind.of_merged and source.merged is None:
        others = [name for name, each in TARGETS.items() if not each.of_merged]
        raise UserError(
            f"export.targets: {target} is made of the merged model, and merge.enabled is false; set merge.enabled: "
            f"true, or choose targets from {', '.join(others)}"
        )
    kind.check(source, settings)
    check_published(source.adapter, source.weights)
    with staged_directory(output) as staged:
        details = kind.run(source, settings, staged)
        checked = loaded_check(kind, source, settings, staged)
        files = describe(staged)
        manifest = {"target": target, "settings": settings.model_dump(mode="json"), "files": files}
        write_json(staged / MANIFEST, manifest | details | {"loaded": checked})
    size = byte_size(sum(file["bytes"] for file in files.values()))
    same = f", {checked['equal']} of {len(checked['rows'])} answers equal" if checked["rows"] else ""
    result(f"{size}, opened by {checked['opened_by']}{same}")


def loaded_check(kind: ExportTarget, source: RunResult, settings: Section, exported: Path) -> dict[str, Any]:
    """Return the library that opened the export, and its answers to held-out rows next to those of the merged model, or
    of base and adapter if nothing was merged.

    `agreement` is the share of tokens before the first difference, over all rows. There are no answers if the library
    cannot compute. Raises UserError if the export cannot be opened.
    """
    held_out = open_split(source.data, "test") or open_split(source.data, "validation")
    rows = held_out.select(range(min(ROWS, len(held_out))))
    prompts = [list(row["input_ids"][: row["prompt"] or UNPROMPTED]) for row in rows]
    # First, so that only one model is in memory at a time.
    compared_with, expected, stops, tokenizer = _answers_of_run(source, prompts)
    opened_ = kind.opened(source, settings, exported)
    record: dict[str, Any] = {"opened_by": opened_.library, **opened_.details, "rows": [], "equal": 0}
    if opened_.answers is None:
        return record
    values = opened_.answers(prompts, ANSWER_TOKENS, stops)
    same = total = 0
    for one, other in zip(expected, (_until(each, stops) for each in values), strict=True):
        pairs = list(zip(one, other, strict=False))
        same += next((index for index, (wanted, answer) in enumerate(pairs) if wanted != answer), len(pairs))
        total += len(one)
        texts = {name: tokenizer.decode(ids) for name, ids in (("expected", one), ("exported", other))}
        record["rows"].append(texts | {"equal": one == other})
    equal = sum(row["equal"] for row in record["rows"])
    return record | {"compared_with": compared_with, "equal": equal, "agreement": same / total if total else 1.0}


def _answers_of_run(source: RunResult, prompts: list[list[int]]) -> tuple[str, list[list[int]], list[int], Any]:
    """Return the name of a run's result, its answers, stop tokens and tokenizer."""
    if source.merged is None:
        name, directory, model = "base and adapter", source.adapter, opened.with_adapter(source.weights, source.adapter)
    else:
        name, directory, model = "merged model", source.merged, opened.model_of(source.merged)
    stops = sorted(stop_tokens(directory, model))
    answers = opened.answering(model, name).answers
    assert answers is not None
    tokenizer = tokenizer_of(source.merged or source.weights)
    return name, [_until(each, stops) for each in answers(prompts, ANSWER_TOKENS, stops)], stops, tokenizer


def _until(answer: list[int], stops: list[int]) -> list[int]:
    """Return an answer up to its first stop token, which only some libraries include."""
    return answer[: next((index for index, token in enumerate(answer) if token in stops), len(answer))]
