"""Variables of chat templates, set by rows and by data sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from goldens import answer, prepare_settings, user
from tokenizers_of import tokenizer_of

from zerolora.data.example import BadRow, Example
from zerolora.data.formats import parse
from zerolora.data.formats.reading import Reading
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import SPLITS, open_split
from zerolora.data.template import Template
from zerolora.data.template_variables import literal
from zerolora.errors import UserError

MESSAGES = [user("Who are you?"), answer("I am Bo.")]
THINKING = Reading(arguments=frozenset({"enable_thinking", "reasoning_effort"}))


def template_of(name: str, **changed: Any) -> Template:
    return Template(tokenizer_of(name), prepare_settings(**changed))


def arguments(row: dict[str, Any], reading: Reading = THINKING) -> dict[str, Any] | None:
    return parse({"messages": MESSAGES, **row}, "messages", reading).arguments


class Folder:
    """A folder with a model's tokenizer, rows, and what prepare makes of them."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.tokenizer = path, tokenizer_of(name)
        self.tokenizer.save_pretrained(path / "model")
        (path / "model" / "config.json").write_text(json.dumps({"vocab_size": len(self.tokenizer)}))
        (path / "model" / "manifest.json").write_text("{}")

    def prepare(self, values: list[dict[str, Any]], /, **changed: Any) -> list[str]:
        """Return the texts of all rows."""
        (self.path / "rows.json").write_text(json.dumps(values))
        settings = prepare_settings(path=str(self.path / "rows.json"), split={"validation": 1, "test": 1}, **changed)
        prepare(settings, self.path / "model" / "manifest.json", self.path / "out", 1)
        read = [row for name in SPLITS for row in open_split(self.path / "out", name)]
        return sorted(self.tokenizer.decode(row["input_ids"]) for row in read)

    def record(self) -> dict[str, Any]:
        return json.loads((self.path / "out" / "manifest.json").read_text())


def rows_of(number: int = 4, **columns: Any) -> list[dict[str, Any]]:
    return [{"messages": [user(f"Hi {each}"), answer(f"Hello {each}")], **columns} for each in range(number)]


# Variables


def test_variables_are_those_of_the_template() -> None:
    assert template_of("qwen3").variables >= {"enable_thinking"}
    assert template_of("gpt-oss").variables >= {"reasoning_effort", "model_identity", "builtin_tools"}
    for name in ("qwen3", "gpt-oss", "llama-3.2"):
        own = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
        assert own.isdisjoint(template_of(name).variables)
    assert not template_of("chatml").variables
    assert not template_of("gpt-oss", template="plain").variables


@pytest.mark.parametrize(
    ("variable", "one", "other"),
    [("reasoning_effort", "low", "high"), ("model_identity", "You are Bo.", "You are Al.")],
)
def test_each_row_has_its_own_values(variable: str, one: str, other: str) -> None:
    """As transformers renders it, also if a row of the same roles with another value came before."""
    template = template_of("gpt-oss")
    for held in ({variable: one}, {variable: other}, {variable: one}, {}):
        text = "".join(piece.text for piece in template.pieces(Example(MESSAGES, arguments=held or None)))
        expected = tokenizer_of("gpt-oss").apply_chat_template(MESSAGES, tokenize=False, **held)
        assert today_removed(text) == today_removed(expected)


def today_removed(text: str) -> str:
    before, mark, after = text.partition("Current date: ")
    return before + mark + after[10:]


# Rows


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": '{"enable_thinking": false}'}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
        ({"enable_thinking": None, "reasoning_effort": " "}, None),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"chat_template_kwargs": '{"enable_thinking": null}'}, None),
    ],
)
def test_arguments_of_a_row(row: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert arguments(row) == expected


def test_ignored_arguments_are_left_out() -> None:
    reading = Reading(arguments=THINKING.arguments, ignored=frozenset({"enable_thinking"}))
    for row in ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}):
        assert arguments(row, reading) is None
    held = {"enable_thinking": True, "reasoning_effort": "low"}
    assert arguments({"chat_template_kwargs": held}, reading) == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking is True, and chat_template_kwargs.enable_thinking is False; keep one",
        ),
        ({"chat_template_kwargs": "[1]"}, "use an object"),
        ({"chat_template_kwargs": "{"}, "is not JSON"),
        (
            {"chat_template_kwargs": '{"enable_thinking": true, "effort": "low"}'},
            r"chat_template_kwargs.effort is 'low', which the chat template does not read \(it reads enable_thinking, "
            r"reasoning_effort\); correct its name, or set ignore: \[chat_template_kwargs.effort\]",
        ),
        ({"enable_thinking": "False"}, 'is the text .*; write {"enable_thinking": false} into the column'),
    ],
)
def test_unclear_arguments_are_refused(row: dict[str, Any], error: str) -> None:
    with pytest.raises(BadRow, match=error):
        arguments(row)


def test_texts_have_no_arguments() -> None:
    assert parse({"text": "Hi", "enable_thinking": True}, "text", THINKING).arguments is None


def test_a_value_that_the_template_refuses_or_misreads() -> None:
    example = Example(MESSAGES, arguments={"reasoning_effort": ["low"]})
    with pytest.raises(BadRow, match="refuses it"):
        template_of("gpt-oss").pieces(example)
    with pytest.raises(BadRow, match=r"thinking is 'off', which .* takes for true; use true or false"):
        template_of("deepseek-v3.1").pieces(Example(MESSAGES, arguments={"thinking": "off"}))


# prepare


def test_prepared_rows_have_their_arguments(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "gpt-oss")
    rows = rows_of(2, reasoning_effort="low") + rows_of(2, chat_template_kwargs={"reasoning_effort": "high"})
    texts = folder.prepare(rows)
    assert [text.count("Reasoning: low") for text in texts].count(1) == 2
    assert [text.count("Reasoning: high") for text in texts].count(1) == 2
    page = (tmp_path / "out" / "mask.html").read_text()
    for name in ("reasoning_effort", "chat_template_kwargs.reasoning_effort"):
        assert f"<td>{name}</td><td>column, in rows</td><td>2</td><td>given to the template</td>" in page
    assert folder.record()["chat_template"] is None


def test_unread_keys_stop(tmp_path: Path) -> None:
    """Also if the row has as many values as are read."""
    rows = rows_of(4, chat_template_kwargs={"reasoning_effort": "low", "effort": "no part of a template of this kind"})
    with pytest.raises(UserError, match=r"chat_template_kwargs.effort is .* nothing reads it"):
        Folder(tmp_path, "gpt-oss").prepare(rows)


def test_both_answers_of_a_pair_have_them(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "gpt-oss")
    rows = [
        {"prompt": f"Hi {each}", "chosen": f"Hello {each}", "rejected": f"Bye {each}", "reasoning_effort": "low"}
        for each in range(4)
    ]
    folder.prepare(rows, rows="pairs")
    for row in open_split(folder.path / "out", "train"):
        for key in ("input_ids", "rejected_input_ids"):
            assert "Reasoning: low" in folder.tokenizer.decode(row[key])


def test_settings_hold_for_all_rows(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "gpt-oss")
    texts = folder.prepare(rows_of(), template_arguments={"reasoning_effort": "low"})
    assert all("Reasoning: low" in text for text in texts)
    with pytest.raises(UserError, match="reasoning_effort is 'high', but template_arguments sets 'low'; .*ignore"):
        folder.prepare(rows_of(reasoning_effort="high"), template_arguments={"reasoning_effort": "low"})
    held = {"template_arguments": {"reasoning_effort": "low"}, "ignore": ["reasoning_effort"]}
    assert folder.prepare(rows_of(reasoning_effort="high"), **held) == texts


def test_unknown_setting() -> None:
    with pytest.raises(UserError, match=r"template_arguments: effort is not a variable .*enable_thinking.*"):
        template_of("qwen3", template_arguments={"effort": "low"})
    with pytest.raises(UserError, match="it reads none"):
        template_of("chatml", template_arguments={"effort": "low"})


# The published template


def published(name: str, **held: Any) -> tuple[Template, Callable[..., str]]:
    """Return a template with arguments of the settings, and how transformers renders its published form."""
    template = template_of(name, template_arguments=held)
    source = template.published()
    assert source

    def rendered(messages: list[dict[str, Any]], **passed: Any) -> str:
        text = tokenizer_of(name).apply_chat_template(messages, chat_template=source, tokenize=False, **passed)
        return today_removed(text)

    return template, rendered


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("gpt-oss", {"reasoning_effort": "low"}),
        ("gpt-oss", {"model_identity": 'You are "Bo"\nand {{ no }} {% code %}.\\n', "reasoning_effort": "high"}),
    ],
)
def test_published_template_prompts_as_in_training(name: str, held: dict[str, Any]) -> None:
    template, rendered = published(name, **held)
    for messages, prompt in ((MESSAGES[:1], True), (MESSAGES, False)):
        text = rendered(messages, add_generation_prompt=prompt)
        assert text == today_removed(template.write(messages, None, prompt))
    trained = "".join(piece.text for piece in template.pieces(Example(MESSAGES)))
    assert today_removed(trained).startswith(rendered(MESSAGES[:1], add_generation_prompt=True))
    assert rendered(MESSAGES[:1], add_generation_prompt=True) != today_removed(
        template_of(name).write(MESSAGES[:1], None, True)
    )


def test_a_caller_wins_over_the_published_value() -> None:
    _, rendered = published("qwen3", enable_thinking=False)
    prompt = {"add_generation_prompt": True}
    assert "<think>\n\n</think>" in rendered(MESSAGES[:1], **prompt)
    assert "<think>" not in rendered(MESSAGES[:1], **prompt, enable_thinking=True)


def test_values_are_written_as_jinja() -> None:
    assert literal({"a": [1, 2.5, None, True], 'b"': "é\n"}) == '{"a": [1, 2.5, none, true], "b\\"": "é\\n"}'


def test_an_argument_that_the_template_replaces_is_refused() -> None:
    """Mistral's templates read system_message, and set it where the conversation begins with one."""
    template = template_of("mistral-v0.3")
    assert "system_message" in template.variables
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    given = {"system_message": "Be brief."}
    assert "Be brief." in template.write(asked[:1], arguments=given)
    both = [{"role": "system", "content": "Be kind."}, *asked]
    with pytest.raises(BadRow, match="system_message is 'Be brief.', which the chat template replaces in this row"):
        template.pieces(Example(both, arguments=given))
