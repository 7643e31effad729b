"""`zerolora chat RUN`: talk to what a run trained, also beside its base model or another run.

The tokens of a prompt are those of training: the same tokenizer, template and system prompt. Answers are greedy, as in
evaluation, and end at the stop tokens of training.
"""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from zerolora.config.compared import compared
from zerolora.config.settings import PrepareSettings, Resolved
from zerolora.data.example import BadRow, Example
from zerolora.data.formats.row_values import text_of
from zerolora.data.template import Template
from zerolora.data.tokenize import ChunkTokenizer
from zerolora.errors import UserError, shown
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
from zerolora.evaluate.generation import answer_batch
from zerolora.files import MANIFEST, read_object
from zerolora.log import escaped
from zerolora.machine import cpu_matmul
from zerolora.model import added_tokens, foreign
from zerolora.model.answer_text import AnswerTexts
from zerolora.model.manifest import check_same_base, is_merged, located
from zerolora.publish.finished import CONFIG, MODELS, RESULTS

KINDS = ("merged", "adapter", "base")
NEW = "/new"
"""Begins another conversation."""
ENDS = ("/quit", "/exit", "/bye")
"""End the chat, as the end of the input does."""
PROMPT = {
    *("template", "template_arguments", "template_text", "system"),
    *("stop_tokens", "pad_token", "add_tokens", "add_special_tokens"),
}
"""Settings of `prepare` that a prompt depends on."""
WEIGHTS = Path("resources/weights")
Message = dict[str, Any]


class ChatModel:
    """A loaded model with its side of the conversation."""

    def __init__(self, name: str, resolved: Resolved, limit: int) -> None:
        """`name`: RUN, or RUN/KIND; `limit`: the most tokens of an answer. Raises UserError if the run lacks it."""
        self.name, self.limit = name, limit
        model, data, prepared = named_model(name, resolved)
        # As `prepare` made them of the same files. The loss decides where a row ends, and here it is the answer.
        self.tokenizing = ChunkTokenizer(MODELS / prepared.model, prepared.model_copy(update={"loss": "assistant"}))
        _check_same_format(self.tokenizing.template, prepared, data)
        self.model, self.tokenizer = load(
            model.merged or model.base, model.torch_device, added_tokens.of_data(data), model.loaded_adapter
        )
        self.stops = stops_of(model, self.model, self.tokenizer, data)
        self.texts = AnswerTexts(self.tokenizer, self.stops)
        self.longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.messages: list[Message] = []

    def answer(self, question: str, write: Callable[[str], object], *, live: bool, interruptible: bool = False) -> None:
        """Write the answer to a question in the conversation so far; `live`: while it is generated. `interruptible`: an
        answer that is live ends at Ctrl-C, and the conversation continues with what was written.

        Raises BadRow for a question that cannot be asked, before anything is written.
        """
        asked = [*self.messages, {"role": "user", "content": text_of(question, "the question")}]
        prompt = self._prompt(asked)
        if self.longest and len(prompt) + self.limit > self.longest:
            raise BadRow(
                f"the conversation has {len(prompt):,} tokens, and the model takes {self.longest:,} with "
                f"{self.limit:,} of an answer; type {NEW}"
            )
        written = TokenByToken(self.texts.text, write)
        token = written.token if live else None
        padding = self.tokenizer.pad_token_id
        try:
            (tokens,) = answer_batch(self.model, padding, [prompt], self.stops, self.limit, ended=token)
            text = written.end(tokens)
        except KeyboardInterrupt:
            if not interruptible:
                raise
            text = written.text
        self.messages = [*asked, {"role": "assistant", "content": text}]

    def _prompt(self, messages: list[Message]) -> list[int]:
        """Return the tokens before the answer to the last message."""
        example = Example([*messages, {"role": "assistant", "content": "."}])
        tokens = self.tokenizing.encoder.encode([self.tokenizing.template.pieces(example)])
        prompt: list[int] = tokens.ids[0][: int(tokens.prompt[0])].tolist()
        return prompt


class TokenByToken:
    """The text of an answer, written while its tokens are generated."""

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str], object]) -> None:
        self.decode, self.write, self.text = decode, write, ""

    def token(self, tokens: list[int]) -> bool:
        """Write what is new in the answer so far, but no part of a character. Return False: it does not end here."""
        text = self.decode(tokens).rstrip("\ufffd")
        if text.startswith(self.text) and text != self.text:
            self.write(text[len(self.text) :])
            self.text = text
        return False

    def end(self, tokens: list[int]) -> str:
        """Write the rest of the answer, and return all of it. It is written again if its last tokens have changed the
        text before them, as those of some tokenizers do."""
        text = self.decode(tokens)
        self.write(text[len(self.text) :] if text.startswith(self.text) else f"\n{text}")
        return text


class NamedModel(NamedTuple):
    """The files of a model of a run, its prepared data, and the settings of that data."""

    model: EvaluatedModel
    data: Path
    prepared: PrepareSettings


def named_model(name: str, resolved: Resolved) -> NamedModel:
    """Return the model RUN, or RUN/KIND. Raises UserError if there is no such run, or it lacks the model."""
    run, _, kind = name.partition("/")
    if run not in resolved.runs or kind not in ("", *KINDS):
        parts = ", ".join(f"RUN/{each}" for each in KINDS)
        runs = ", ".join(resolved.runs)
        raise UserError(f"{shown(name)}: use one of the runs {runs}, or a part of one: {parts}")
    settings = resolved.runs[run]
    prepared = resolved.prepare[settings.dataset]
    model = _model(RESULTS / run, kind, WEIGHTS / f"{prepared.model}.json", settings.train.device)
    _check_same_prompts(settings.dataset, prepared)
    return NamedModel(model, RESULTS / "data" / settings.dataset, prepared)


def chat(
    models: list[ChatModel],
    questions: Iterable[str],
    write: Callable[[str], object],
    *,
    live: bool,
    interruptible: bool = False,
) -> None:
    """Write the answers of all models to each question, in turn. A model that cannot answer writes the reason.

    live: `write` shows them in a terminal, while they are generated. interruptible: Ctrl-C ends an answer only.
    """
    show = partial(_show, write) if live else write
    for question in map(str.strip, questions):
        if question in ENDS:
            return
        if question == NEW:
            for model in models:
                model.messages = []
            continue
        for model in models if question else ():
            write(f"{model.name}: " if len(models) > 1 else "")
            try:
                model.answer(question, show, live=live, interruptible=interruptible)
            except BadRow as error:
                show(f"({error})")
            write("\n")


def _show(write: Callable[[str], object], text: str) -> None:
    """Write a text for a terminal, without characters that could move its cursor, change its state or turn a line."""
    write(escaped(text))


def opened(names: list[str], resolved: Resolved, limit: int) -> list[ChatModel]:
    """Return the named models, loaded. Raises UserError if a name is given twice."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{twice[0]} is named twice; name each model once")
    if all(run.train.device == "cpu" for run in resolved.runs.values()):
        cpu_matmul.choose()
    disable_progress_bar()  # of each model's weights
    return [ChatModel(name, resolved, limit) for name in names]


def asked() -> Iterator[str]:
    """Yield the lines that are typed, or piped in, until their end; invalid UTF-8 as surrogates."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 (edits the line)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()  # what is printed next, such as a shell's prompt, begins a line
            return


def _model(results: Path, kind: str, weights: Path, device: Any) -> EvaluatedModel:
    """Return the files of a model of a run."""
    base, adapter, merged = located(weights), results / "adapter", results / "merged" / MANIFEST
    if kind == "base":
        return EvaluatedModel(base, device=device)
    for path in (adapter / MANIFEST, *([merged] if kind != "adapter" else [])):
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; train the run first: `zerolora run`")
    check_same_base(adapter, weights)
    if kind == "adapter" or (not kind and not is_merged(merged)):
        return EvaluatedModel(base, adapter, device=device)
    return EvaluatedModel(base, adapter, located(merged), device)


def _check_same_prompts(dataset: str, prepared: PrepareSettings) -> None:
    """Raise UserError if the config's prompts are not those of the last run."""
    last = read_object(RESULTS / "config.json", "zerolora run")["prepare"].get(dataset, {})
    now = compared(prepared)
    for key in sorted(PROMPT):
        if last.get(key) != now.get(key):
            raise UserError(
                f"{CONFIG}: prepare.{dataset}.{key} is not that of the last run ({_shown(last, key)}); "
                "run `zerolora run`, or restore it"
            )


def _shown(settings: dict[str, Any], key: str) -> str:
    return shown(settings[key]) if key in settings else "its default"


def _check_same_format(template: Template, prepared: PrepareSettings, data: Path) -> None:
    """Raise UserError if the data was prepared with another template or other stop tokens than the config has now."""
    record = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "chat_template")
    if record["chat_template"] != template.published() or not {*(prepared.stop_tokens or ())} <= {
        *record["stop_tokens"]
    }:
        raise UserError(
            f"{data}: was prepared with another template or other stop tokens than {CONFIG} has now; run `zerolora run`"
        )
