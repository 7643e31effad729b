"""Renders conversations to text, divided into supervised and unsupervised pieces.

A chat template renders the text: the tokenizer's own, a well-known one, or one of the user's. To locate a turn, the
conversation is rendered again with a marker in its place. This works for any template, also for those without
`{% generation %}`.
"""

import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.bounded import bounded, line_of, within_bounds
from zerolora.compat.transformers_patches import compile_template
from zerolora.config.settings import PrepareSettings
from zerolora.data.encode import Piece, any_of
from zerolora.data.example import BadRow, Example
from zerolora.data.formats.reading import REASONING
from zerolora.data.prompt_formats import CHECKED, PROMPT_FORMATS
from zerolora.data.special_tokens import SpecialTokens
from zerolora.data.template_variables import DOCUMENTS, by_tools, set_by, variables_of, with_values
from zerolora.errors import UserError, shown
from zerolora.files import canonical

Messages = list[dict[str, Any]]
# Markers are private-use characters, which real text does not contain: one for any message, and one for each message.
MARK, MARKS = "\U00100000", 0xF0000
DATE = datetime.datetime(2024, 7, 26)  # today's date for templates, fixed so that data does not change from day to day
# Template arguments for a generation prompt: default, without thoughts, with thoughts.
THOUGHTS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
MOST_FRAMES = 1024  # in memory; each set of a row's arguments has its own
# Text that looks like a special token: <|im_end|>, </s> or [/s].
MARKER = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
EXCHANGES = ([USER, ASSISTANT], [{"role": "system", "content": "Be brief."}, USER, ASSISTANT])
"""Conversations by which two templates are compared."""
EITHER: tuple[list[Any] | None, ...] = (None, [])
"""Without tools and with some, for which a tokenizer may have two templates."""
TRIED = ([USER], True), *((exchange, False) for exchange in EXCHANGES)
"""Conversations by which values of a variable are compared, some with the generation prompt."""
# The chat template of `template: plain`.
PLAIN = """{%- for message in messages if message.content or message.tool_calls -%}
{%- if message.tool_calls %}{{ raise_exception("tool calls have no plain form; set template: chat") }}{% endif -%}
{%- if loop.previtem and "assistant" not in (message.role, loop.previtem.role) %}{{ "\\n" }}{% endif -%}
{{- message.content + eos_token * (message.role == "assistant") -}}
{%- endfor -%}"""


class Template:
    """Renders conversations with the chat template that the settings name.

    Uses `template`, `template_arguments`, `template_writes`, `system`, `loss`, `stop_tokens` and `pad_token` of
    `settings`. `stops`: the tokens that end an answer, from the settings, otherwise the end-of-sequence token, those of
    the model's generation_config.json, and the template's own. `padding`: the token that fills batches. Raises
    UserError if the model lacks a token that the template needs, or a chat template that the settings require, or if
    the template does not read one of the arguments or writes another text than `template_writes`.
    """

    def __init__(self, tokenizer: Any, settings: PrepareSettings, model: Path | None = None) -> None:
        self.tokenizer, self.name = tokenizer, settings.template
        self.settings, self.model = settings, model
        self.plain, self.own = settings.template == "plain", settings.template_text
        self.system, self.loss = settings.system, settings.loss
        self.called = "the chat template" if self.name in ("chat", "plain") else f"template {self.name}"
        if self.own is not None:
            self.called = self.name  # the file
        self.remedy = f"correct {self.name}" if self.own is not None else "give the model another chat template"
        self.given: dict[str, Any] = dict(settings.template_arguments)
        special = SpecialTokens(tokenizer, settings, model)
        if self.name == "chat" and not tokenizer.chat_template:
            raise UserError(
                f"the model's tokenizer has no chat template; set template: {', '.join(special.fitting())}, "
                "or a file as in config/templates/mine.jinja"
            )
        if self.name in PROMPT_FORMATS:
            special.check_format(self.name)
        # Some tokenizers define a BOS token that they never add to a text.
        self.bos = tokenizer.bos_token if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
        added = tokenizer.added_tokens_decoder.values()
        self.added = any_of(token.content for token in added)
        # The compiled sandboxed template: apply_chat_template takes twice as long, and passes today's date.
        self.compile, self.tokens = compile_template, {**tokenizer.special_tokens_map, "eos_token": special.end}
        if self.name in PROMPT_FORMATS:
            self.tokens["bos_token"] = self.bos
        self.programs: dict[str, _Program] = {}  # by template source
        self.end, self.stops = special.end, special.stops
        self.switches: dict[tuple[str, str], bool] = {}  # by template source and variable
        self.tail = self._tail(special.set_by_user)
        self.padding = special.padding(tokenizer, settings.pad_token, self.stops)
        # Tokens that a message must not contain.
        self.special = re.compile(any_of({token.content for token in added if token.special} | self.stops))
        self._check_given()
        self._check_written()
        self.stop = re.compile(any_of(self.stops))
        self.ending = re.compile(rf"{any_of([self.tail])}|(\s*({self.added}))*?\s*({self.stop.pattern})")
        self.frames: dict[tuple[Supervision, bool, str], _Frame | None] = {}
        self.others: dict[tuple[str, str], Template | None] = {}  # by name and loss, of other settings
        # Whether the template writes the name of a message, by template source and role.
        self.names: dict[tuple[str, str], bool] = {}
        self.thoughts: str | None = None  # the template's key of thoughts, None if not known yet
        # The separator of an instruction and its input.
        self.input = PROMPT_FORMATS[self.name].input if self.name in PROMPT_FORMATS else "\n"

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, besides those that it always gets."""
        return self._read(None) | self._read([])

    def _read(self, tools: list[Any] | None) -> frozenset[str]:
        """Return the same for conversations with or without tools."""
        try:
            return self._program(self._source(tools)).reads
        except UserError:
            raise
        except Exception:
            return frozenset()  # `write` reports that it cannot be compiled

    def _check_given(self) -> None:
        """Raise UserError if the template does not read an argument of the settings as it is."""
        for name, value in self.given.items():
            where = f"prepare: template_arguments: {name}"
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise UserError(
                    f"{where} is not a variable that {self.called} reads (it reads {known}); correct its name, or "
                    "remove it"
                )
            misread = (name in self._read(tools) and self._is_misread(name, value, tools) for tools in EITHER)
            if any(misread):
                raise UserError(f"{where} is {shown(value)}, {self._taken(value)}")
            if held := self.special.search(json.dumps(value, ensure_ascii=False)):
                raise UserError(f"{where} contains the special token {held[0]}; remove it")

    def _check_written(self) -> None:
        """Raise UserError if the template writes another text than `template_writes`. A conversation that it refuses
        is refused as a row too."""
        for messages, given in zip(CHECKED, self.settings.template_writes, strict=False):
            theirs = given.replace("{bos_token}", self.tokenizer.bos_token or "").replace("{eos_token}", self.end)
            text = self._writes(messages)
            if text is None:
                continue
            # What follows the last turn is not trained.
            ours, theirs = (each.rstrip().removesuffix(self.end).rstrip() for each in (text, theirs))
            if ours != theirs:
                alike = sum(1 for _ in itertools.takewhile(bool, map(str.__eq__, ours, theirs)))
                start = max(0, alike - 20)
                raise UserError(
                    f"prepare: template_writes has {shown(theirs[start:])}, but {self.called} writes "
                    f"{shown(ours[start:])}; set template to a file that writes it (docs/data.md#the-prompt-format), "
                    "or remove template_writes to train with the other text"
                )

    def _arguments(self, example: Example) -> dict[str, Any]:
        """Return the arguments that a row sets and the settings do not. Raises BadRow for one that the template does
        not read as it is, or that contradicts the settings."""
        result = {}
        for name, value in (example.arguments or {}).items():
            if name not in self._read(example.tools):
                kind = "without" if example.tools is None else "with"
                raise BadRow(
                    f"{name} is {shown(value)}, and the chat template for conversations {kind} tools does not read it; "
                    f"set ignore: [{name}]"
                )
            if name in self.given:
                if canonical(value) != canonical(self.given[name]):
                    raise BadRow(
                        f"{name} is {shown(value)}, but template_arguments sets {shown(self.given[name])}; set "
                        f"ignore: [{name}], or remove it from template_arguments"
                    )
                continue
            if self._is_misread(name, value, example.tools):
                raise BadRow(f"{name} is {shown(value)}, {self._taken(value)}, or ignore: [{name}]")
            if held := self.special.search(json.dumps(value, ensure_ascii=False)):
                raise BadRow(f"{name} contains the special token {held[0]}, which would end or begin a turn; remove it")
            result[name] = value
        return result

    def _taken(self, value: Any) -> str:
        """Return what the template takes a misread value for, and what to use."""
        return f"which {self.called} takes for {'false' if value in (1,) else 'true'}; use true or false"

    def _is_misread(self, name: str, value: Any, tools: list[Any] | None) -> bool:
        """Return whether the template only tests if a variable is true, and takes a value for the wrong one, or one
        that holds more than that."""
        if value is None or isinstance(value, bool):
            return False
        source = self._source(tools)
        sample = EITHER[source != self._source(None)]

        def written(held: Any) -> list[str | None]:
            further = {name: held}
            return [self._writes(messages, sample, prompt, further) for messages, prompt in TRIED]

        if (source, name) not in self.switches:
            yes, no, text = map(written, (True, False, MARK))
            self.switches[source, name] = yes != no and text in (yes, no)
        if not self.switches[source, name]:
            return False
        number = isinstance(value, (int, float)) and value in (0, 1)
        return written(value) == written(not value if number else True)

    def _reads_name(self, role: str, tools: list[Any] | None) -> bool:
        """Return whether the template writes the `name` of a message of this role."""
        source = self._source(tools)
        if (source, role) not in self.names:
            messages = next(each for each in EXCHANGES if role in [message["role"] for message in each])
            named = [{**each, "name": MARK} if each["role"] == role else each for each in messages]
            self.names[source, role] = MARK in (self._writes(named, None if source == self._source(None) else []) or "")
        return self.names[source, role]

    def with_settings(self, template: str, loss: str) -> "Template | None":
        """Return the template of another name, or of another `loss`, for the same tokenizer; None if the tokenizer
        lacks one of its tokens, or if it does not read an argument of the settings."""
        if (template, loss) not in self.others:
            update: dict[str, Any] = {"loss": loss} if loss else {"template": template, "template_text": None}
            try:
                other = Template(self.tokenizer, self.settings.model_copy(update=update), self.model)
            except UserError:
                other = None
            self.others[template, loss] = other
        return self.others[template, loss]

    def named(self, name: str) -> "Template | None":
        return self.with_settings(name, "")

    def pieces(self, example: Example, remedy: bool = True) -> list[Piece]:
        """Return the pieces of a conversation or text, up to the last supervised one.

        Every supervised turn of the assistant ends with its stop token. Raises BadRow if the template rejects the
        conversation, drops a part of it, or writes no stop token where one is needed; with `remedy`, the error names
        the settings and edits with which this row was written.
        """
        if example.text is not None:
            text = example.text.removeprefix(self.bos).removesuffix(self.end)
            begin = [Piece(self.bos, None, self.loss == "everything")] if self.bos else []
            return [*begin, Piece(text + self.end, "text", True)]
        messages, how = example.messages or [], self.supervision(example)
        if len(how.roles) > len(messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        if example.thoughts:
            messages = self._with_thoughts(messages)
        if example.input and self.input != "\n":
            messages = self._with_input(messages, example.input)
        self._check_no_special_token(messages, example.tools)
        self._check_names(messages, example.tools)
        arguments = self._arguments(example) if example.arguments else {}
        try:
            return [piece for piece in self._pieces(messages, example, how, arguments) if piece.text]
        except _SettledError:
            raise
        except BadRow as error:
            what, _, default = str(error).partition("; ")
            if not remedy or not (remedies := self._remedies(example, unlocated=self.remedy in default)):
                raise
            raise BadRow(f"{what}; {', or '.join(remedies)}") from None

    def _pieces(
        self, messages: Messages, example: Example, how: "Supervision", arguments: dict[str, Any]
    ) -> list[Piece]:
        text = self.write(messages, example.tools, arguments=arguments)
        self._check_not_overwritten(messages, example.tools, arguments, text)
        weighed = bool(example.supervised)
        row = _Row(messages, example.tools, text, example.thoughts, example.input, weighed, arguments)
        pieces = self._by_frame(row, how)
        if pieces is None:
            supervised, wanted = self._supervised(how)
            turns = self._by_marks(row, wanted)
            row, turns = self._by_prompt(row, turns) or (row, turns)
            pieces = self._cut(row, turns, supervised)
        return pieces

    def _check_not_overwritten(
        self, messages: Messages, tools: list[Any] | None, arguments: dict[str, Any], text: str
    ) -> None:
        """Raise BadRow for a text that the template replaces by one of its own, as a system_message by the message of
        the conversation."""
        for name in arguments.keys() & self._program(self._source(tools)).sets if arguments else ():
            others = {key: value for key, value in arguments.items() if key != name}
            marked = {**others, name: MARK}
            if isinstance(arguments[name], str) and {
                text, self._writes(messages, tools, False, others), self._writes(messages, tools, False, marked)
            } == {text}:  # fmt: skip
                raise BadRow(
                    f"{name} is {shown(arguments[name])}, which {self.called} replaces in this row; remove it, or "
                    f"set ignore: [{name}]"
                )

    def _remedies(self, example: Example, unlocated: bool) -> list[str]:
        """Return the settings and edits with which a rejected row is written, those that keep more of it first.

        unlocated: the template depends on a content, so that another one may be needed.
        """
        found = [keeping] if (keeping := self._keeping(example)) else []
        edits: list[tuple[str, Callable[[Example], Example | None]]] = [
            ("set loss: last", lambda example: example),
            ("set ignore: [NAME] to learn the answer without it", _without_thoughts),
            ("put it into the text", _with_thoughts_in_text),
            ("write one call in each message, followed by its result", _one_call_a_message),
        ]
        if self.loss == "last":
            edits = edits[1:]
        for number in range(1, len(edits)):
            for chosen in itertools.combinations(edits, number):
                changed: Example | None = example
                for _, edit in chosen:
                    changed = edit(changed) if changed else None
                last = chosen[0][0] == "set loss: last"
                trial = self.with_settings("", "last") if last else self
                if changed and trial and (last or changed != example) and trial._accepts(changed):
                    found.append(" and ".join(name for name, _ in chosen).replace("NAME", example.thoughts))
            if found:
                return found
        plain = self.named("plain") if unlocated and not self.plain else None
        return ["set template: plain"] if plain and plain._accepts(example) else []

    def _accepts(self, example: Example) -> bool:
        try:
            return bool(self.pieces(example, remedy=False))
        except (BadRow, UserError):
            return False

    def _keeping(self, example: Example) -> str | None:
        """Return the template that keeps all of a rejected row, if any: the model's own, or a format that writes a
        plain exchange exactly as this template does."""
        from_model = self.name != "chat" and self.own is None and bool(self.tokenizer.chat_template)
        if from_model and (chat := self.named("chat")) and chat._keeps(example):
            return "set template: chat, which has a form for it"
        for name in self._alike:
            if (other := self.named(name)) and other._keeps(example):
                return f"set template: {name}, which writes the same text, but keeps all of the row"
        return None

    @cached_property
    def _alike(self) -> list[str]:
        """The names of the formats that write a plain exchange as this template does."""
        others = {name: self.named(name) for name in PROMPT_FORMATS if name != self.name}
        return [
            name
            for name, other in others.items()
            if other and any(self._agrees(other, exchange) for exchange in EXCHANGES)
        ]

    def _agrees(self, other: "Template", exchange: Messages) -> bool:
        texts = [each._writes(exchange) for each in (self, other)]
        return None not in texts and len({str(text).strip() for text in texts}) == 1

    def _keeps(self, example: Example) -> bool:
        """Return whether the template writes every message of a conversation."""
        try:
            text = "".join(piece.text for piece in self.pieces(example, remedy=False))
        except (BadRow, UserError):
            return False
        messages = example.messages or []
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        return all(_has(text, message["content"]) for message in messages[: last + 1])

    def supervision(self, example: Example) -> "Supervision":
        """Return the roles and marks that decide which turns of a conversation are supervised."""
        roles = tuple([message["role"] for message in example.messages or ()])
        supervised, prompt = example.supervised, example.prompt
        if self.system and roles and roles[0] != "system":
            roles = ("system", *roles)
            supervised, prompt = supervised and [None, *supervised], prompt and prompt + 1
        return Supervision(roles, tuple(supervised) if supervised else (), prompt)

    def answer_index(self, example: Example) -> int | None:
        """Return the index in `example.messages` of the answer that evaluation prompts for, the last in its pieces;
        None if there is none."""
        messages = example.messages or []
        if not example.supervised and isinstance(self.loss, str):  # the last answer, in nearly all rows
            for number in range(len(messages) - 1, -1, -1):
                if messages[number]["role"] == "assistant":
                    return number
            return None
        how = self.supervision(example)
        answer = self._last_answer(how, self._supervised(how)[0])
        return None if answer is None else answer - len(how.roles) + len(messages)

    def write(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        prompt: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation, with `prompt` including the generation prompt, and with these further arguments.

        Raises BadRow if the template rejects the conversation, and UserError if it exceeds the bounds on time, memory
        or output.
        """
        source = self._source(tools)
        try:
            program, known, *_ = self._program(source)
            values = {**known, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
            if arguments:
                values |= arguments
            # Template.render copies the globals for each conversation and takes twice as long.
            context, environment = program.environment.context_class, program.environment
            return within_bounds(
                self.called,
                lambda: "".join(program.root_render_func(context(environment, values, program.name, program.blocks))),
            )
        except UserError:
            raise
        except Exception as error:
            # Any exception of a template means that it rejects these messages.
            reason = " ".join(str(error).split())[:200]
            if not self.tokenizer.chat_template:
                reason = reason.replace("set template: chat", "choose a model that has a chat template")
            line = line_of(error, self.programs[source].compiled) if self.own and source in self.programs else None
            raise BadRow(f"{self.name}:{line}: {reason}" if line else f"{self.called} refuses it: {reason}") from None

    def _program(self, source: str) -> "_Program":
        """Return a compiled template. Raises an error of jinja2, or UserError as `write` does."""
        if source not in self.programs:
            with bounded(self.called):
                compiled = self.compile(source)
                reads, sets = (names(compiled.environment, source) for names in (variables_of, set_by))
            known = {**compiled.globals, **self.tokens, "strftime_now": DATE.strftime}
            passed = {*known, *self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES, "messages", "tools", "add_generation_prompt"}
            values = {**known, DOCUMENTS: None, **self.given}
            self.programs[source] = _Program(compiled, values, reads - passed, sets)
        return self.programs[source]

    def published(self) -> str | None:
        """Return the chat template that writes the same text in transformers, None for the tokenizer's own."""
        if self.name == "chat" and self.end == self.tokenizer.eos_token and not self.given:
            return None
        source, texts = by_tools(self._source(None), self._source([])), {"eos_token": self.end}
        if self.plain:
            source = "{{- bos_token -}}" + source
        if self.plain or self.name in PROMPT_FORMATS:
            texts["bos_token"] = self.bos
        known = self.tokenizer.special_tokens_map
        # The sandbox drops the line break after a block.
        changed = [
            f"{{% set {name} = {json.dumps(text)} %}}\n" for name, text in texts.items() if text != known.get(name)
        ]
        return with_values("".join(changed) + source, self.given)

    def _source(self, tools: list[Any] | None) -> str:
        """Return the source of the template. A tokenizer may have another one for conversations with tools."""
        if self.own is not None:
            return self.own
        if self.name in PROMPT_FORMATS:
            return PROMPT_FORMATS[self.name].jinja
        return PLAIN if self.plain else str(self.tokenizer.get_chat_template(tools=tools))

    def _writes(self, *arguments: Any) -> str | None:
        try:
            return self.write(*arguments)
        except BadRow:
            return None

    def _check_no_special_token(self, messages: Messages, tools: list[Any] | None) -> None:
        for number, message in enumerate([*messages, {"tools": tools}] if tools else messages):
            text = message["content"] if len(message) == 2 else json.dumps(message, ensure_ascii=False)
            if held := self.special.search(text):
                name = _name(messages, number) if number < len(messages) else "the list of tools"
                raise BadRow(f"{name} contains the special token {held[0]}, which would end or begin a turn; remove it")

    def _check_names(self, messages: Messages, tools: list[Any] | None) -> None:
        """Raise BadRow for a message with a name that the template does not write. Templates may find the call of a
        tool's message by its name, so that is not checked."""
        for number, message in enumerate(messages):
            if "name" in message and message["role"] != "tool" and not self._reads_name(message["role"], tools):
                raise BadRow(
                    f"{self.called} leaves out the name {shown(message['name'])} of {_name(messages, number)}; set "
                    "ignore: [name]"
                )

    def _with_input(self, messages: Messages, further: str) -> Messages:
        """Return messages with the input of the last question in the prompt format's form."""
        number = _last_question([message["role"] for message in messages])
        content = messages[number]["content"].removesuffix(f"\n{further}") + self.input + further
        return [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]]

    def _with_thoughts(self, messages: Messages) -> Messages:
        """Return messages with their thoughts under the template's key."""
        if self.thoughts is None:
            question, answer = _marked("user", "assistant")
            texts = {name: self._writes([question, {**answer, name: MARK}]) or "" for name in REASONING}
            self.thoughts = next((name for name, text in texts.items() if MARK in text), REASONING[0])
        if self.thoughts == REASONING[0]:
            return messages
        return [
            {self.thoughts if key == REASONING[0] else key: value for key, value in message.items()}
            for message in messages
        ]

    def _supervised(self, how: "Supervision") -> tuple[set[int], set[int]]:
        """Return the indices of the supervised messages, and of the messages whose turns must be located."""
        answers = [number for number, role in enumerate(how.roles) if role == "assistant"]
        left_out = {number for number, mark in enumerate(how.supervised) if mark is False}
        if self.loss == "everything":
            return set(range(len(how.roles))) - left_out, {*answers, *left_out}
        if self.loss == "last":
            supervised = set(answers[-1:])
        else:
            supervised = {number for number, mark in enumerate(how.supervised) if mark}
            if self.loss == "assistant":
                supervised.update(number for number in answers if number >= how.prompt)
            else:
                supervised.update(number for number, role in enumerate(how.roles) if role in self.loss)
        supervised -= left_out
        # Evaluation prompts the model up to this answer, so it must be located even if it is not supervised.
        answer = self._last_answer(how, supervised)
        return supervised, supervised if answer is None else supervised | {answer}

    def _last_answer(self, how: "Supervision", supervised: set[int]) -> int | None:
        """Return the index of the last answer in the row's pieces that the row does not exclude from the loss."""
        marks = how.supervised or [None] * len(how.roles)
        answers = (n for n in range(max(supervised, default=-1), -1, -1) if how.roles[n] == "assistant")
        return next((number for number in answers if marks[number] is not False), None)

    def _cut(self, row: "_Row", turns: "dict[int, _Turn]", supervised: set[int]) -> list[Piece]:
        """Divide a row into pieces at its turns. Raises BadRow as `pieces` does."""
        everything, position = self.loss == "everything", 0
        pieces = [Piece(self.bos, None, everything)] if self.plain else []
        for number, turn in sorted(turns.items(), key=lambda item: item[1].start):
            if turn.wrong and number not in supervised and not everything:
                continue
            if turn.wrong:
                raise BadRow(f"{turn.wrong}; {turn.remedy or self.remedy}")
            pieces.append(Piece(row.text[position : turn.start], None, everything))
            content, position = row.text[turn.start : turn.end], turn.end
            # An answer that the row excludes from the loss is context: evaluation does not prompt for it.
            role = row.messages[number]["role"] if number in supervised or not everything else None
            if role == "assistant" and number in supervised and not turn.stopped:
                if number != max(supervised):
                    kind = BadRow if self.own is None else _SettledError
                    other = self.remedy if self.own is None else "write {{ eos_token }} there"
                    raise kind(f"{self.called} writes no stop token after an earlier answer; {other}")
                content, position = content + self.end, len(row.text)
            pieces.append(Piece(content, role, number in supervised))
        pieces.append(Piece(row.text[position:], None, everything))
        while pieces and not (pieces[-1].supervised and pieces[-1].text):
            pieces.pop()
        if not pieces:
            why = "the row's own weights leave none; " if row.weighed else ""
            raise _SettledError(
                f"no part of it is supervised with loss {shown(self.loss)}; {why}remove it, or add a role to loss"
            )
        return pieces

    def _by_frame(self, row: "_Row", how: "Supervision") -> list[Piece] | None:
        """Return the pieces by filling the contents into the frame of these roles, None if the text differs."""
        if row.tools is not None or any(len(message) > 2 for message in row.messages):
            return None
        section = bool(row.input) and self.input != "\n"
        key = how, section, canonical(row.arguments) if row.arguments else ""
        frame = self.frames.get(key)
        if frame is None and key not in self.frames and len(self.frames) < MOST_FRAMES:
            frame = self.frames[key] = self._frame(how, section, row.arguments)
        if frame is None:
            return None
        contents = [message["content"] for message in row.messages]
        if section:
            number = _last_question(how.roles)
            contents[number] = contents[number].removesuffix(self.input + row.input)
            contents.append(row.input)
        if _filled(frame.text, contents) != row.text:
            contents = [content.strip() for content in contents]
            if _filled(frame.text, contents) != row.text:
                return None
        return [
            piece if holes is None else Piece(_filled(holes, contents), piece.role, piece.supervised)
            for holes, piece in frame.pieces
        ]

    def _frame(self, how: "Supervision", section: bool, arguments: dict[str, Any] | None) -> "_Frame | None":
        """Return the template's text around messages of these roles, None if it depends on their contents.

        section: the last question has an input, which gets the last marker.
        """
        messages = _marked(*how.roles)
        if section:
            messages[_last_question(how.roles)]["content"] += self.input + chr(MARKS + len(messages))
        row = _Row(messages, None, self._writes(messages, None, False, arguments) or "", arguments=arguments)
        text = _open(row.text)
        if sorted(text[1::2]) != list(range(len(messages) + section)):
            return None
        try:
            supervised, wanted = self._supervised(how)
            turns = self._by_marks(row, wanted)
            pieces = self._cut(row, turns, supervised)
        except BadRow:
            return None
        if any(turn.wrong for turn in turns.values()):
            return None
        opened = [(_open(piece.text), piece) for piece in pieces]
        return _Frame(text, [(holes if len(holes) > 1 else None, piece) for holes, piece in opened])

    def _by_marks(self, row: "_Row", wanted: Iterable[int]) -> "dict[int, _Turn]":
        """Locate turns by the change in the text when a marker replaces a message."""
        if row.tools is not None and self._writes(row.messages, None, False, row.arguments) == row.text:
            raise BadRow(f"{self.called} leaves out the tools; choose a model whose template has them")
        places = [self._place(row, number) for number in range(len(row.messages))]
        return {number: self._turn(row, number, places) for number in wanted}

    def _place(self, row: "_Row", number: int) -> tuple[int | None, int | None]:
        """Return the begin and end of a message's content, or of the name in its last tool call; None if unknown."""
        message = row.messages[number]
        calls, marked = message.get("tool_calls"), {**message, "content": MARK}
        if calls:
            called = {**calls[-1], "function": {**calls[-1]["function"], "name": MARK}}
            marked = {**message, "tool_calls": [*calls[:-1], called]}
        text = self._again(row, [*row.messages[:number], marked, *row.messages[number + 1 :]])
        if text is None:
            return None, None
        parts = text.split(MARK)
        if calls and len(calls) > 1:
            self._check_calls(row, number)
        if len(parts) == 1 and (calls or message["content"]):
            part = "the tool calls of " if calls else ""
            raise BadRow(f"{self.called} leaves out {part}{_name(row.messages, number)}; remove it")
        begin = len(parts[0]) if row.text.startswith(parts[0]) else None
        if calls:
            # Templates may repeat the name with the tool's answer, so the end follows from its length.
            return begin, None if begin is None else begin + len(calls[-1]["function"]["name"])
        end = len(row.text) - len(parts[-1]) if row.text.endswith(parts[-1]) else None
        known = len(parts) == 2 and (begin is None or end is None or begin <= end)
        return (begin, end) if known else (None, None)

    def _check_calls(self, row: "_Row", number: int) -> None:
        """Raise BadRow if the template writes some of a message's calls, but not all."""
        message = row.messages[number]
        marks = [chr(MARKS + position) for position in range(len(message["tool_calls"]))]
        calls = [
            {**call, "function": {**call["function"], "name": mark}}
            for call, mark in zip(message["tool_calls"], marks, strict=True)
        ]
        marked = {**message, "tool_calls": calls}
        text = self._again(row, [*row.messages[:number], marked, *row.messages[number + 1 :]]) or ""
        missing = [position for position, mark in enumerate(marks) if mark not in text]
        if 0 < len(missing) < len(marks):
            function = message["tool_calls"][missing[0]]["function"]
            raise BadRow(
                f"{self.called} leaves out call {missing[0] + 1} of the {len(marks)} tool calls of "
                f"{_name(row.messages, number)} ({shown(function['name'])}); remove it"
            )

    def _again(self, row: "_Row", messages: Messages, prompt: bool = False, **others: Any) -> str | None:
        """Render other messages with the tools and arguments of a row, and maybe further arguments."""
        return self._writes(messages, row.tools, prompt, {**(row.arguments or {}), **others})

    def _turn(self, row: "_Row", number: int, places: list[tuple[int | None, int | None]]) -> "_Turn":
        message, (begin, end) = row.messages[number], places[number]
        name, calls, answers = _name(row.messages, number), message.get("tool_calls"), message["role"] == "assistant"
        start = self._start(row, number, begin, places[number - 1][1] if number else None)
        following = places[number + 1][0] if number + 1 < len(row.messages) else len(row.text)
        thoughts = next((message[key] for key in REASONING if key in message), "")
        if answers and not _has(row.text[:following], thoughts):
            return _without(self.called, row, name)
        if begin is not None and start is None and not calls:
            prompt = self._again(row, row.messages[:number], prompt=True) or ""
            words = shown(prompt[len(_common(prompt, row.text)) :])
            return _Turn(wrong=f"{self.called} asks for {name} with {words}, which is missing before it")
        if start is None or end is None or following is None:
            return _Turn(wrong=f"what {self.called} writes around {name} depends on its content")
        # The name of a call is somewhere in its turn, which ends with the next stop token.
        result = self.stop.search(row.text, end, following) if calls else self.ending.match(row.text, end)
        end = result.end() if result else len(row.text.rstrip()) if calls else end
        written = row.text[min(start, begin or start) : end]
        if answers and not _has(written, thoughts):
            return _without(self.called, row, name)
        if answers and not _has(written, message["content"]):
            return _Turn(wrong=f"{self.called} leaves out part of {name}", remedy="remove that part")
        return _Turn(start, end, result is not None)

    def _start(self, row: "_Row", number: int, begin: int | None, since: int | None) -> int | None:
        """Return the position of the turn with content at `begin`: an answer begins after the generation prompt.

        Without a generation prompt, the turn begins after its header, but before a blank that follows the header, since
        tokenizers join it to the next word. None if the generation prompt, with or without thoughts, is not in the
        text.
        """
        before, calls = row.messages[:number], row.messages[number].get("tool_calls")
        after_header = None if begin is None or calls else len(row.text[:begin].rstrip(" "))
        without = self._again(row, before)
        if without is None or row.messages[number]["role"] != "assistant":
            return after_header
        for how in THOUGHTS[:1] if "enable_thinking" in {*self.given, *(row.arguments or ())} else THOUGHTS:
            prompt = self._again(row, before, prompt=True, **how) or without
            header = prompt[len(_common(without, prompt)) :]
            if row.text.startswith(prompt):
                return len(prompt) if header or calls or not row.text[len(prompt) : begin].strip() else after_header
            if not header:
                return after_header
            # The template may render earlier messages differently once there is an answer.
            # A turn may have several headers; its prompt ends with the first.
            position = row.text.rfind(header, None, begin) if since is None else row.text.find(header, since, begin)
            if begin is not None and position >= 0:
                return position + len(header)
        return None

    def _by_prompt(self, row: "_Row", turns: "dict[int, _Turn]") -> "tuple[_Row, dict[int, _Turn]] | None":
        """Return the row as its last generation prompt and answer, if that prompt opens a thought that the template
        drops from finished conversations. Not for an answer with thoughts or calls of its own, which would be lost."""
        number, content = len(row.messages) - 1, row.messages[-1]["content"]
        if turns.keys() != {number} or not turns[number].wrong:
            return None
        if not row.messages[-1].keys().isdisjoint((*REASONING, "tool_calls")):
            return None
        prompt, off, on = (self._again(row, row.messages[:-1], prompt=True, **how) or "" for how in THOUGHTS)
        opened = prompt[len(_common(prompt, row.text)) :]
        begin, end = self._place(row, number)
        empty = prompt == off != on and row.text[begin:end].strip() == content.strip()
        if not opened or not (empty or content.startswith(opened)):
            return None
        answer = row.text[begin:end] if empty else content[len(opened) :]
        row = row._replace(text=prompt + answer + (self.tail or self.end))
        return row, {number: _Turn(len(prompt), len(row.text), True)}

    def _tail(self, set_by_user: bool) -> str:
        """Return the template's text after every answer, up to the stop token, and add that to `stops`.

        set_by_user: the settings list the stop tokens. Raises UserError if they lack this one, or if the model has no
        such token.
        """
        last, between = (self._writes(_marked("user", "assistant", "user")[:end]) for end in (2, 3))
        behind = [text.partition(chr(MARKS + 1))[2] for text in (last, between or last) if text]
        shared = _common(*behind) if behind else ""
        result = re.search(any_of(self.stops), shared) or re.match(rf"\s*(?:{self.added})", shared)
        stop = result[0].strip() if result else ""
        if stop and set_by_user and stop not in self.stops:
            raise UserError(f"stop_tokens: {self.called} ends an answer with {stop}, which is not listed; add it")
        if self.own is not None and not result and (unknown := MARKER.match(shared)):
            raise UserError(
                f"{self.name}: ends an answer with {unknown[1]}, which the model does not have as one token, so no "
                f"answer would end there; write {{{{ eos_token }}}} after it or in its place, here {self.end}"
            )
        self.stops |= {stop} - {""}
        return shared[: result.end()] if result else ""


class Supervision(NamedTuple):
    """Decides, with the config's `loss`, which turns are supervised: the roles, and `supervised` (empty for None) and
    `prompt` of an Example."""

    roles: tuple[str, ...]
    supervised: tuple[bool | None, ...] = ()
    prompt: int = 0


class _SettledError(BadRow):
    """A mistake that no other setting would repair."""


class _Program(NamedTuple):
    """A compiled template, the variables that it always gets, and the names of the others that it reads, and of those
    that it sets."""

    compiled: Any
    known: dict[str, Any]
    reads: frozenset[str]
    sets: frozenset[str]


class _Row(NamedTuple):
    messages: Messages
    tools: list[Any] | None
    text: str
    thoughts: str = ""
    input: str = ""
    weighed: bool = False
    arguments: dict[str, Any] | None = None


class _Frame(NamedTuple):
    """A conversation's text and pieces, with message indices for contents; None for a piece without contents."""

    text: list[Any]
    pieces: list[tuple[list[Any] | None, Piece]]


class _Turn(NamedTuple):
    """The range of a turn in the text, including its stop token if `stopped`. wrong: why it cannot be supervised.
    remedy: the setting to use then, if not the common one."""

    start: int = 0
    end: int = 0
    stopped: bool = False
    wrong: str = ""
    remedy: str = ""


def _has(text: str, part: str) -> bool:
    """Return whether a text contains a part, ignoring white space."""
    return not part or "".join(part.split()) in "".join(text.split())


def _without(template: str, row: _Row, name: str) -> _Turn:
    return _Turn(wrong=f"{template} leaves out {row.thoughts} of {name}", remedy="remove it")


def _without_thoughts(example: Example) -> Example | None:
    """Return a row without thoughts, as `ignore` reads it."""
    if not example.thoughts:
        return None
    messages = [
        {key: value for key, value in message.items() if key != REASONING[0]} for message in example.messages or ()
    ]
    return example._replace(messages=messages, thoughts="")


def _with_thoughts_in_text(example: Example) -> Example | None:
    """Return a row with the thoughts of each answer at the beginning of its content."""
    if not example.thoughts:
        return None
    messages = [
        {**message, "content": f"<think>\n{message[REASONING[0]]}\n</think>\n\n{message['content']}"}
        if REASONING[0] in message
        else message
        for message in example.messages or ()
    ]
    return _without_thoughts(example._replace(messages=messages))


def _one_call_a_message(example: Example) -> Example | None:
    """Return a row with a message for each call, followed by its result; None if there is one already, or if it is
    unknown which results belong to which calls."""
    messages = example.messages or []
    if example.prompt or all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return None
    marks = example.supervised or [None] * len(messages)
    result: list[tuple[dict[str, Any], bool | None]] = []
    number = 0
    while number < len(messages):
        message, mark = messages[number], marks[number]
        number += 1
        if len(calls := message.get("tool_calls", ())) < 2:
            result.append((message, mark))
            continue
        end = number
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        answers = list(zip(messages[number:end], marks[number:end], strict=True))
        if answers and len(answers) != len(calls):
            return None
        by_call = {answer.get("tool_call_id"): (answer, mark) for answer, mark in answers}
        if by_call.keys() == {call.get("id") for call in calls}:
            answers = [by_call[call.get("id")] for call in calls]
        for position, call in enumerate(calls):
            first = message if position == 0 else {"role": "assistant", "content": ""}
            result.append(({**first, "tool_calls": [call]}, mark))
            result += answers[position : position + 1]
        number = end
    changed = example._replace(messages=[message for message, _ in result])
    return changed._replace(supervised=[mark for _, mark in result]) if example.supervised else changed


def _open(text: str) -> list[Any]:
    """Split text at its markers, each replaced by the index of its message."""
    parts = re.split(f"([{chr(MARKS)}-\U000ffffd])", text)
    return [ord(part) - MARKS if position % 2 else part for position, part in enumerate(parts)]


def _filled(text: list[Any], contents: list[str]) -> str:
    return "".join([part if type(part) is str else contents[part] for part in text])


def _marked(*roles: str) -> Messages:
    return [{"role": role, "content": chr(MARKS + number)} for number, role in enumerate(roles)]


def _last_question(roles: Sequence[str]) -> int:
    return max(number for number, role in enumerate(roles) if role == "user")


def _name(messages: Messages, number: int) -> str:
    return f"the {messages[number]['role']} message {number + 1}"


def _common(one: str, other: str) -> str:
    differing = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one if other.startswith(one) else one[: next(differing, len(other))]
