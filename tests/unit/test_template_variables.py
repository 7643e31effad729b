"""The variables that a chat template reads before it sets them, and templates with values for them."""

import json
from pathlib import Path

import pytest
from goldens import TOOLS, answer, prepare_settings, user
from tokenizers_of import FAMILIES, tokenizer_like, tokenizer_of

from zerolora.compat.transformers_patches import compile_template
from zerolora.data.example import BadRow, Example
from zerolora.data.prepare import prepare
from zerolora.data.task_prompts import prompts_of
from zerolora.data.template import Template
from zerolora.data.template_variables import by_tools, variables_of
from zerolora.errors import UserError


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ x }}", {"x"}),
        ("{% set x = 1 %}{{ x }}", set()),
        ("{% set x = x if x is defined else 1 %}{{ x }}", {"x"}),
        ("{% if a %}{% set x = 1 %}{% endif %}{{ x }}", {"a", "x"}),
        ("{% if a %}{% set x = 1 %}{{ x }}{% endif %}", {"a"}),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% set x = 2 %}{% else %}{% set x = 3 %}{% endif %}{{ x }}", {"a", "b"}),
        ("{% if a %}{% set x = 1 %}{% else %}{{ raise_exception('no') }}{% endif %}{{ x }}", {"a"}),
        ("{% for m in ms %}{% if m %}{% set x = m %}{{ x }}{{ loop.index }}{% endif %}{% endfor %}", {"ms"}),
        ("{% for m in messages %}{% set x = m %}{% endfor %}{{ x }}", {"messages", "x"}),
        ("{% for m in ms %}{% if a %}{% break %}{% else %}{% set x = m %}{% endif %}{{ x }}{% endfor %}", {"ms", "a"}),
        ("{% macro f(x, y=z) %}{{ x + y + w }}{% endmacro %}{{ f(1) }}", {"z", "w"}),
        ("{% set ns = namespace(a=x) %}{% set ns.a = 1 %}{{ ns.a }}", {"x"}),
        ("{% set x %}{{ y }}{% endset %}{{ x }}", {"y"}),
        ("{% with x = y %}{{ x }}{% endwith %}{{ x }}", {"x", "y"}),
        ("{% generation %}{{ x }}{% endgeneration %}", {"x"}),
    ],
)  # fmt: skip
def test_variables_that_are_read_before_they_are_set(source: str, names: set[str]) -> None:
    assert variables_of(compile_template(source).environment, source) == names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("chatml", set()),
        ("command-r7b", {"developer_preamble", "documents", "enable_citations", "enable_thinking"}),
        ("deepseek-v3.1", {"enable_thinking", "thinking"}),
        ("gemma-4", {"enable_thinking"}),
        ("gpt-oss", {"builtin_tools", "model_identity", "reasoning_effort"}),
        ("llama-3.2", {"custom_tools", "date_string", "tools_in_user_message"}),
        ("qwen3", {"enable_thinking"}),
    ],
)
def test_variables_of_real_templates(name: str, names: set[str]) -> None:
    """Without what they set in a branch and read there, such as Qwen3's reasoning_content."""
    assert Template(tokenizer_of(name), prepare_settings()).variables == names


def test_column_of_a_name_that_the_template_sets_is_no_argument(tmp_path: Path) -> None:
    """It would be overwritten, and the thoughts of the row lost."""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    (tmp_path / "model" / "manifest.json").write_text("{}")
    rows = [
        {"messages": [user(f"Hi {each}"), answer("Hello")], "reasoning_content": f"They greet me, {each} times."}
        for each in range(4)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = prepare_settings(path=str(tmp_path / "rows.json"), split={"validation": 1, "test": 1})
    with pytest.raises(UserError, match="reasoning_content is .*They greet me.* nothing reads it"):
        prepare(settings, tmp_path / "model" / "manifest.json", tmp_path / "out", 1)


CHATML, QWEN3 = (tokenizer_of(name).chat_template for name in ("chatml", "qwen3"))


@pytest.mark.parametrize(
    ("default", "tool_use"),
    [
        (CHATML, QWEN3),
        ("\n {{ messages[0].content }}\n", "  x\n\n{{ tools | length }}  \n"),
        ("{% if 1 %}\nA\n   {% endif %}", "   {{ 1 }}"),
    ],
)
def test_two_templates_are_published_as_one(default: str, tool_use: str) -> None:
    tokenizer = tokenizer_like(FAMILIES["qwen3"], None)
    tokenizer.chat_template = {"default": default, "tool_use": tool_use}
    for tools in (None, TOOLS):
        texts = [
            tokenizer.apply_chat_template([user("Hi")], tools=tools, chat_template=template, tokenize=False)
            for template in (None, by_tools(default, tool_use))
        ]
        assert texts[0] == texts[1]


def test_argument_of_the_other_template_is_refused() -> None:
    tokenizer = tokenizer_like(FAMILIES["qwen3"], None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN3}
    template = Template(tokenizer, prepare_settings())
    messages, held = [user("Hi"), answer("Hello")], {"enable_thinking": False}
    assert template.pieces(Example(messages, TOOLS, arguments=held))
    with pytest.raises(BadRow, match=r"without tools does not read it; set ignore: \[enable_thinking\]"):
        template.pieces(Example(messages, arguments=held))


def test_prompts_of_tasks_have_the_date_of_the_data_set() -> None:
    template = Template(tokenizer_of("llama-3.2"), prepare_settings(template_arguments={"date_string": "1 Jan 2020"}))
    row = {"messages": [user("Hi")], "place": "rows.jsonl:1"}
    (prompt,) = prompts_of([row], tokenizer_like(FAMILIES["llama-3.2"], template.published()))
    assert "Today Date: 1 Jan 2020" in prompt
    assert prompt == template.write([user("Hi")], prompt=True)
    (prompt,) = prompts_of([row], tokenizer_of("llama-3.2"))
    assert "Today Date: 26 Jul 2024" in prompt
