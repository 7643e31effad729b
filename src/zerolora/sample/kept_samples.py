"""Sampled answers on disk, by prompt and number, from which a killed sample resumes and one with a larger `n` goes on.

Every process appends to its own file. The directory's name is a fingerprint of everything that decides an answer but
the prompt and the answer's number, so answers of other settings, weights or code are never reused.
"""

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config import fingerprint
from zerolora.config.compared import compared
from zerolora.config.settings import SampleSettings
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.kept import files_of, lines_in
from zerolora.files import canonical
from zerolora.sample.prompt_batches import format_of

NO_ANSWER = ("n", "batch", "ranks", "vllm_python", "of", "dataset")
"""Settings that change no answer that there is; the model and the prompts are compared by their files."""


class Sampled(NamedTuple):
    """A sampled answer."""

    text: str | list[int]
    """Its text, not yet cut at a text of `stop`; or its tokens, if another engine has drawn them."""
    tokens: int | None
    """Generated tokens; None if a server does not say."""
    ended: bool = True
    """Whether a stop token or text ended it, not the maximum length."""
    whole: bool = True
    """Whether the text has all that was generated (model/answer_text.py)."""


Answers = dict[tuple[str, int], Sampled]
"""Answers by the key of the prompt in hexadecimal and their number."""


def open_folder(work: Path, key: str) -> Path:
    """Return the folder of the answers with a key, and remove those of other settings from `work`."""
    folder = work / key
    for other in work.glob("*/"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("figures*.json"):
        path.unlink()  # of an earlier start
    return folder


def answers_in(folder: Path) -> Answers:
    """Return the answers in a folder."""
    result: Answers = {}
    for key, *answer in lines_in(folder):
        with contextlib.suppress(TypeError, ValueError):
            prompt, sample = key
            result[prompt, sample] = Sampled(*answer)
    return result


def key_of(settings: SampleSettings, data: Path, model: EvaluatedModel, engine: str) -> str:
    """Return a fingerprint of the settings, weights, engine and code that decide the answers."""
    decides = {
        "settings": {key: value for key, value in compared(settings).items() if key not in NO_ANSWER},
        "format": format_of(data),
        "weights": [files_of(path) for path in (model.base, model.adapter, model.merged) if path],
        "engine": engine,
        "code": fingerprint.of_stage("sample", {"evaluate.tasks": set(), "methods": set()}),
    }
    return hashlib.sha256(canonical(decides).encode()).hexdigest()[:16]


def line_of(prompt: bytes, sample: int, answer: Sampled) -> list[Any]:
    """Return the line of an answer in its file."""
    return [[prompt.hex(), sample], *answer]
