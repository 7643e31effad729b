"""The loss mask against hand-written golden texts and other ways to compute it, over real chat templates."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from goldens import CONVERSATIONS, TOOLS, Golden, answer, goldens, marked, prepare_settings, user
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers_of import CHATML, FAMILIES, TEMPLATES, Family, tokenizer_like, tokenizer_of
from transformers.utils.chat_template_utils import render_jinja_template

from zerolora.config.settings import PrepareSettings
from zerolora.data.encode import Piece
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import parse
from zerolora.data.formats.reading import Reading
from zerolora.data.template import Template

GOLDENS = goldens()
# The token that ends every answer, by template; the others end only the last answer, with EOS.
STOPS = {
    "alphamonarch": "</s>",
    "chatml": "<|im_end|>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
    "deepseek-coder": "<|EOT|>",
    "deepseek-v2": "<｜end▁of▁sentence｜>",
    "deepseek-v3.1": "<｜end▁of▁sentence｜>",
    "exaone-3": "[|endofturn|]",
    "gemma-2": "<end_of_turn>",
    "gemma-3": "<end_of_turn>",
    "granite-3.0": "<|end_of_text|>",
    "kimi-k3": "<|end_of_msg|>",
    "llama-2": "</s>",
    "llama-3": "<|eot_id|>",
    "llama-3.2": "<|eot_id|>",
    "mistral-nemo": "</s>",
    "mistral-small-3.2": "</s>",
    "mistral-v0.1": "</s>",
    "mistral-v0.2": "</s>",
    "mistral-v0.3": "</s>",
    "openchat-3.5": "<|end_of_turn|>",
    "phi-3": "<|end|>",
    "phi-4": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "vicuna": "</s>",
    "zephyr": "</s>",
}
STOPLESS = ("chatglm3", "chatml-open", "falcon-180b", "glm-4", "glm-edge", "gpt-oss", "metharme")
NO_SYSTEM = ("gemma-2", "mistral-v0.1", "mistral-v0.3", "mistral-nemo")
DATED = ("gpt-oss", "llama-3.2", "mistral-small-3.2")
TRAINING = ("command-r", "gemma-2", "gemma-3", "llama-3", "phi-3", "phi-4", "qwen3")

WORDS = [
    *(
        "assistant",
        "user",
        "ASSISTANT:",
        "USER: ",
        "Falcon:",
        "### Response:\n",
        "<<SYS>>",
        "{{ x }}",
        "{% if %}",
        "\\n",
    ),
    *("</s", "[INST", "[/INST", "<|im_end", "<|im_", "|>", "<｜User", "<start_of", "<0x0A>", "▁", "<think>", "«", '"'),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u00a0",
        "a",
        "word",
        "É",
        "e\u0301",
        "王大",
        "你好。",
        "\u200d",
        "\U0001d400",
    ),
]
CONTENT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join)


def template_of(name: str, loss: str | list[str] = "assistant", **others: str) -> Template:
    return Template(tokenizer_of(name), prepare_settings(loss=loss, **others))


def template_for(golden: Golden, directory: Path) -> Template:
    """Return the template of a golden, its stop tokens in a model's generation_config.json."""
    tokenizer = tokenizer_of(golden.template)
    options = prepare_settings(loss=golden.loss)
    if not golden.stops:
        return Template(tokenizer, options)
    config = {"eos_token_id": tokenizer.convert_tokens_to_ids(golden.stops)}
    (directory / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Template(tokenizer, options, directory)


def like(template: str | None, **others: Any) -> Any:
    """Return a ChatML tokenizer with another template."""
    return tokenizer_like(Family("qwen", None, "<|im_end|>", CHATML)._replace(**others), template)


def options(loss: str = "assistant", template: str = "chat", system: str = "") -> PrepareSettings:
    return prepare_settings(template=template, system=system, loss=loss)


def spans(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return start and end of the supervised pieces in the text."""
    result, place = [], 0
    for piece in pieces:
        if piece.supervised:
            result.append((place, place + len(piece.text)))
        place += len(piece.text)
    return result


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[dict[str, Any]]:
    """Draw a conversation that the template accepts, without special tokens in its contents."""
    turns = draw(st.integers(1, 3))
    messages = [{"role": "system", "content": draw(CONTENT)}] if name not in NO_SYSTEM and draw(st.booleans()) else []
    for _ in range(turns):
        messages += [user(draw(CONTENT)), answer(draw(CONTENT))]
    special = template_of(name).special
    assume(not any(special.search(message["content"]) for message in messages))
    return messages


# Golden texts


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_pieces_match_golden_texts(golden: Golden, tmp_path: Path) -> None:
    template = template_for(golden, tmp_path)
    if golden.refusal:
        with pytest.raises(BadRow) as refused:
            template.pieces(golden.example)
        assert golden.refusal in str(refused.value)
    else:
        assert marked(template.pieces(golden.example)) == golden.text


@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if not golden.refusal], ids=str)
def test_joined_pieces_match_the_template(golden: Golden, tmp_path: Path) -> None:
    template = template_for(golden, tmp_path)
    text = template.write(golden.example.messages or [], golden.example.tools)
    joined = "".join(piece.text for piece in template.pieces(golden.example))
    if not text.startswith(joined) and golden.template in ("deepseek-r1-distill", "gemma-4"):
        # The prompt has a thought, which the template drops after the answer.
        text = template.write((golden.example.messages or [])[:-1], prompt=True)
        joined = joined[: len(text)]
    if golden.template in STOPLESS and not text.startswith(joined):
        joined = joined.removesuffix(template.tokenizer.eos_token)
    assert text.startswith(joined)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_template_has_the_common_goldens(name: str) -> None:
    covered = {golden.conversation for golden in GOLDENS if golden.template == name}
    assert covered >= {"single", "multi", "system", "blanks", "unicode", "tools"}


def test_every_template_names_its_source() -> None:
    sources = (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(.+?\.jinja)` \|", sources, re.MULTILINE)) == {
        path.name for path in TEMPLATES.glob("*.jinja")
    }


@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if golden.template not in DATED], ids=str)
def test_text_matches_apply_chat_template(golden: Golden, tmp_path: Path) -> None:
    template, messages, tools = template_for(golden, tmp_path), golden.example.messages or [], golden.example.tools
    for prompt in (False, True):
        try:
            expected = template.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            with pytest.raises(BadRow, match=re.escape(str(error).split("\n")[0][:100])):
                template.write(messages, tools, prompt)
        else:
            assert template.write(messages, tools, prompt) == expected


def test_date_is_fixed() -> None:
    template = Template(like("{{ strftime_now('%A %d %B %Y, %b %a %y %m %H:%M:%S') }}"), options())
    assert template.write([user("Hi")]) == "Friday 26 July 2024, Jul Fri 24 07 00:00:00"
    macro = Template(like("{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}\n\n  {{ day() }}"), options())
    assert macro.write([user("Hi")]) == "\n  2024-07-26"


# Other ways to compute the mask


@pytest.mark.parametrize("name", STOPS)
@given(data=st.data())
@settings(max_examples=6)
def test_mask_matches_prefix_differencing(name: str, data: st.DataObject) -> None:
    """If every prompt is a prefix of the text, an answer reaches from its end to the next stop token."""
    messages = data.draw(conversations(name))
    for loss in ("assistant", "last"):
        template = template_of(name, loss)
        text = template.write(messages)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        expected = []
        for number in answers if loss == "assistant" else answers[-1:]:
            prompt = template.write(messages[:number], prompt=True)
            assert text.startswith(prompt)
            expected.append((len(prompt), text.index(STOPS[name], len(prompt)) + len(STOPS[name])))
        pieces = template.pieces(Example(messages))
        assert "".join(piece.text for piece in pieces) == text[: expected[-1][1]]
        assert spans(pieces) == expected


@pytest.mark.parametrize("name", STOPLESS)
@given(data=st.data())
@settings(max_examples=6)
def test_last_answer_without_stop_token_ends_with_eos(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    template = template_of(name, "last")
    text, eos = template.write(messages), template.tokenizer.eos_token
    prompt = template.write(messages[:-1], prompt=True)
    assert text.startswith(prompt)
    said = text[len(prompt) :].removesuffix(eos).removesuffix("<|assistant|>")
    *_, last = pieces = template.pieces(Example(messages))
    assert last == Piece(said + eos, "assistant", True)
    assert [piece.supervised for piece in pieces].count(True) == 1
    assert "".join(piece.text for piece in pieces[:-1]) == prompt


@pytest.mark.parametrize("name", TRAINING)
@given(data=st.data())
@settings(max_examples=6)
def test_mask_matches_generation_markers(name: str, data: st.DataObject) -> None:
    """Third-party markers, which also include text after the stop token."""
    messages = data.draw(conversations(name))
    tokenizer = tokenizer_of(f"{name}.training")
    template = Template(tokenizer, options())
    written: Any = render_jinja_template(
        [messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (expected,) = written
    if name == "phi-3":  # its markers have a separate span for EOS after the last answer
        expected = expected[:-1]
    pieces = template.pieces(Example(messages))
    assert [start for start, _ in spans(pieces)] == [start for start, _ in expected]
    for (_, end), (_, theirs) in zip(spans(pieces), expected, strict=True):
        assert text[end:theirs] in ("", "\n")


@pytest.mark.parametrize("name", [*STOPS, *STOPLESS])
@given(data=st.data())
@settings(max_examples=4)
def test_everything_is_supervised(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    if name in STOPLESS:
        messages = messages[-2:]
    pieces = template_of(name, "everything").pieces(Example(messages))
    text = template_of(name).write(messages).removesuffix("<|assistant|>")
    eos = template_of(name).tokenizer.eos_token
    assert "".join(piece.text for piece in pieces) in (text, text + eos, text.rstrip("\n") + eos)
    assert all(piece.supervised for piece in pieces)
    assert [piece.role for piece in pieces if piece.role] == ["assistant"] * (len(messages) // 2)


@pytest.mark.parametrize("name", ["kimi-k3", "llama-3.2", "mistral-nemo", "mistral-v0.3", "qwen2.5", "qwen3"])
@given(city=CONTENT, result=CONTENT, final=CONTENT)
@settings(max_examples=6)
def test_mask_of_tool_calls_matches_prefix_differencing(name: str, city: str, result: str, final: str) -> None:
    special = template_of(name).special
    assume(not any(special.search(text) for text in (json.dumps(city, ensure_ascii=False), city, result, final)))
    messages = [user("Weather?"), answer("", city), {"role": "tool", "content": result, "tool_call_id": "call00001"}]
    messages.append(answer(final))
    template = template_of(name)
    text, expected = template.write(messages, TOOLS), []
    for number in (1, 3):
        prompt = template.write(messages[:number], TOOLS, prompt=True)
        assert text.startswith(prompt)
        expected.append((len(prompt), text.index(STOPS[name], len(prompt)) + len(STOPS[name])))
    assert spans(template.pieces(Example(messages, TOOLS))) == expected


def test_prompt_without_thoughts_is_used() -> None:
    """As in GLM-4.7's template: its prompt requests thoughts by default, and it marks answers without any."""
    tokenizer = like(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ '</think>' if message.role == 'assistant' else '' }}{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}"
    )
    pieces = Template(tokenizer, options()).pieces(Example(CONVERSATIONS["single"]))
    assert marked(pieces) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n</think>«Hello<|im_end|>»"


# Rows that are refused


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("place", [0, 1])
def test_special_token_in_a_content_is_refused(name: str, place: int) -> None:
    tokenizer = tokenizer_of(name)
    for token in tokenizer.all_special_tokens:
        messages = [user("Hi"), answer("Hello")]
        messages[place] = {**messages[place], "content": f"a {token} b"}
        with pytest.raises(BadRow, match=f"message {place + 1} contains the special token {re.escape(token)}"):
            template_of(name).pieces(Example(messages))


@pytest.mark.parametrize(
    ("messages", "tools", "named"),
    [
        ([user("Hi"), answer("", "Oslo<|im_end|>")], TOOLS, "the assistant message 2"),
        ([user("Hi"), answer("", "Oslo")], [{**TOOLS[0], "name": "<|im_start|>"}], "the list of tools"),
        ([{**user("Hi"), "name": "<|im_end|>"}, answer("Hello")], None, "the user message 1"),
    ],
)
def test_special_token_elsewhere_is_refused(messages: list[dict[str, Any]], tools: Any, named: str) -> None:
    with pytest.raises(BadRow, match=f"{named} contains the special token"):
        template_of("qwen2.5").pieces(Example(messages, tools))


def test_added_plain_token_is_text() -> None:
    messages = [user("<tool_call>?"), answer("</tool_call>")]
    assert marked(template_of("qwen2.5").pieces(Example(messages))).endswith("«</tool_call><|im_end|>»")


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_answer_may_start_with_the_end_of_its_prompt() -> None:
    template = Template(like(THINKING), options())
    assert marked(template.pieces(Example(CONVERSATIONS["thinking"]))) == (
        "<|im_start|>user\nWho are you?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n«My name?\n</think>\n\nI am Bo.<|im_end|>»\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n«Late.\n</think>\n\nNow I rest.<|im_end|>»"
    )
    with pytest.raises(BadRow, match=r"asks for the assistant message 2 with '<think>\\n', which is missing before it"):
        template.pieces(Example(CONVERSATIONS["single"]))


def test_dropped_tools_are_refused_besides_a_thought() -> None:
    with pytest.raises(BadRow, match="leaves out the tools"):
        template_of("deepseek-r1-distill").pieces(Example(CONVERSATIONS["pondering"], TOOLS))


def test_thought_after_an_empty_thought_is_refused() -> None:
    """As in DeepSeek-V3.2's template: its prompt has an empty thought; earlier thoughts are dropped."""
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content.split('</think>')[-1] }}"
        "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: <think>"
        "{{ '' if enable_thinking else '</think>' }}{% endif %}"
    )
    template = Template(like(source), options("last"))
    assert marked(template.pieces(Example(CONVERSATIONS["single"]))) == (
        "<|im_start|>user: Hi<|im_end|><|im_start|>assistant: <think></think>«Hello<|im_end|>»"
    )
    with pytest.raises(BadRow, match="asks for the assistant message 2 with '<think></think>'"):
        template.pieces(Example(CONVERSATIONS["pondering"]))
    with pytest.raises(BadRow, match="the assistant message 2"):
        template.pieces(Example([user("Hi"), answer("<think></think>Hello", "Oslo")]))


def test_empty_question_may_be_dropped() -> None:
    messages = [user(""), user("Hi"), answer("Hello")]
    assert marked(template_of("glm-4").pieces(Example(messages))).endswith("Hi<|assistant|>\n«Hello<|endoftext|>»")
    with pytest.raises(BadRow, match="writes around the user message 1 depends on its content; set loss: last"):
        template_of("glm-4", ["user"]).pieces(Example(messages))


def test_tool_call_without_stop_token_must_be_last() -> None:
    """It must be the last message; EOS follows."""
    source = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    template = Template(like(source), options())
    pieces = template.pieces(Example(CONVERSATIONS["tools"][:2]))
    assert marked(pieces) == "user: Weather in Oslo?\nassistant:« weather(Oslo)<|im_end|>»"
    with pytest.raises(BadRow, match="no stop token after an earlier answer"):
        template.pieces(Example(CONVERSATIONS["tools"]))


def test_tool_call_before_a_repeated_message_is_refused() -> None:
    """The start of the next message, and so the end of the call, is unknown."""
    source = (
        "{% for message in messages %}<|im_start|>{{ message.content * (2 if message.role == 'tool' else 1) }}"
        "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(BadRow, match="writes around the assistant message 2 depends on its content; set loss: last"):
        Template(like(source), options()).pieces(Example(CONVERSATIONS["tools"]))


def test_template_gets_the_usual_variables() -> None:
    source = "{{ documents is none }} {{ tools is none }} {{ add_generation_prompt }} {{ eos_token }}"
    assert Template(like(source), options()).write([user("Hi")]) == "True True False <|im_end|>"


def test_repeated_message_is_refused() -> None:
    chatml = tokenizer_of("chatml").chat_template
    tokenizer = like("{{ messages[1].content }}\n" + chatml)
    with pytest.raises(BadRow, match="writes around the assistant message 2 depends on its content; set template"):
        Template(tokenizer, options()).pieces(Example(CONVERSATIONS["single"]))
    with pytest.raises(BadRow, match="writes around the assistant message 2 depends on its content; set loss: last"):
        Template(tokenizer, options()).pieces(Example(CONVERSATIONS["multi"]))
    pieces = Template(tokenizer, options("last")).pieces(Example(CONVERSATIONS["multi"]))
    assert marked(pieces).endswith("«Now I rest.<|im_end|>»")


def test_template_that_needs_tools_reads_them() -> None:
    """A template that fails without tools does read them."""
    chatml = tokenizer_of("chatml").chat_template
    tokenizer = like(
        "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools[0].function.name }}\n" + chatml
    )
    pieces = Template(tokenizer, options()).pieces(Example(CONVERSATIONS["single"], TOOLS))
    assert marked(pieces).endswith("«Hello<|im_end|>»")


# Settings


def test_stop_tokens() -> None:
    assert {name: template_of(name).stops for name in STOPS} == {
        name: {stop, FAMILIES[name].eos} for name, stop in STOPS.items()
    }
    assert {name: template_of(name).stops for name in STOPLESS} == {name: {FAMILIES[name].eos} for name in STOPLESS}
    assert template_of("command-r7b").stops == {"<|END_OF_TURN_TOKEN|>"}
    coder = tokenizer_of("deepseek-coder").chat_template
    base = tokenizer_like(FAMILIES["deepseek-coder"]._replace(eos="<｜end▁of▁sentence｜>"), coder)
    assert Template(base, options()).stops == {"<｜end▁of▁sentence｜>", "<|EOT|>"}


@pytest.mark.parametrize("listed", [True, False])
def test_generation_config_adds_stop_tokens(tmp_path: Path, listed: bool) -> None:
    tokenizer = tokenizer_of("glm-4")
    number = tokenizer.convert_tokens_to_ids("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [number] if listed else number}))
    assert Template(tokenizer, options(), tmp_path).stops == {"<|endoftext|>", "<|user|>"}
    (tmp_path / "generation_config.json").write_text("{}")
    assert Template(tokenizer, options(), tmp_path).stops == {"<|endoftext|>"}


def test_default_system_prompt() -> None:
    template = template_of("llama-2", system="Be kind.")
    assert marked(template.pieces(Example(CONVERSATIONS["single"]))) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]« Hello </s>»"
    )
    assert "Be brief." in marked(template.pieces(Example(CONVERSATIONS["system"])))


def test_tool_use_template_is_chosen_with_tools() -> None:
    chatml, tools = tokenizer_of("chatml").chat_template, tokenizer_of("qwen2.5").chat_template
    template = Template(like({"default": chatml, "tool_use": tools}), options())  # type: ignore[arg-type]
    assert "You are Qwen" not in marked(template.pieces(Example(CONVERSATIONS["single"])))
    assert "You are Qwen" in marked(template.pieces(Example(CONVERSATIONS["tools"], TOOLS)))


# Plain rows and texts


@pytest.mark.parametrize(
    ("name", "loss", "conversation", "expected"),
    [
        ("llama-2", "assistant", "single", "<s>Hi«Hello</s>»"),
        ("llama-2", "assistant", "multi", "<s>Who are you?«I am Bo.</s>»And now?«Now I rest.</s>»"),
        ("llama-2", "last", "multi", "<s>Who are you?I am Bo.</s>And now?«Now I rest.</s>»"),
        ("llama-2", "everything", "multi", "«<s>Who are you?I am Bo.</s>And now?Now I rest.</s>»"),
        ("llama-2", "assistant", "system", "<s>Be brief.\nHi«Hello</s>»"),
        ("llama-2", "assistant", "blanks", "<s>  two\n\nlines «\n a  b \n</s>»"),
        ("llama-2", "assistant", "greeting", "<s>«Welcome.</s>»Hi«Hello</s>»"),
        ("qwen2.5", "assistant", "system", "Be brief.\nHi«Hello<|im_end|>»"),
        ("smollm2", "assistant", "single", "Hi«Hello<|im_end|>»"),
    ],
)
def test_plain_rows(name: str, loss: str, conversation: str, expected: str) -> None:
    template = template_of(name, loss, template="plain")
    assert marked(template.pieces(Example(CONVERSATIONS[conversation]))) == expected


def test_plain_rows_by_role() -> None:
    template = template_of("llama-2", ["user"], template="plain")
    assert marked(template.pieces(Example(CONVERSATIONS["system"]))) == "<s>Be brief.\n«Hi»"
    with pytest.raises(BadRow, match="tool calls have no plain form; set template: chat"):
        template.pieces(Example(CONVERSATIONS["tools"]))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama-2", "Once upon", "<s>«Once upon</s>»"),
        ("llama-2", "<s>Once upon</s>", "<s>«Once upon</s>»"),
        ("smollm2", "Once upon", "«Once upon<|im_end|>»"),
        ("falcon-180b", "Once upon", "«Once upon<|endoftext|>»"),
    ],
)
def test_plain_texts(name: str, text: str, expected: str) -> None:
    assert marked(template_of(name).pieces(Example(text=text))) == expected


R1_PLAIN = [user("Hi"), answer("Hello")]
# A model's template, a conversation that it cannot write in full, and a format that can.
COMPLETE: list[tuple[str, list[dict[str, Any]], str]] = [
    ("deepseek-r1-distill", [*R1_PLAIN, user("And now?"), answer("Now I rest.")], "deepseek-3"),
    ("mistral-v0.3", [{"role": "system", "content": "Be brief."}, *R1_PLAIN], "mistral"),
    ("gemma-2", [{"role": "system", "content": "Be brief."}, *R1_PLAIN], "gemma"),
]


@pytest.mark.parametrize(("name", "messages", "other"), COMPLETE, ids=[name for name, *_ in COMPLETE])
def test_complete_format_is_suggested(name: str, messages: list[dict[str, Any]], other: str) -> None:
    """Not "remove it" or "loss: last", which lose a part of the row."""
    with pytest.raises(BadRow) as caught:
        template_of(name).pieces(Example(messages))
    assert str(caught.value).endswith(f"; set template: {other}, which writes the same text, but keeps all of the row")
    assert str(caught.value).count("; ") == 1
    template = Template(tokenizer_of(name), prepare_settings(template=other))
    text = "".join(piece.text for piece in template.pieces(Example(messages)))
    assert all(message["content"] in text for message in messages)
    assert template.write(R1_PLAIN) == template_of(name).write(R1_PLAIN)


def test_incomplete_formats_are_not_suggested() -> None:
    with pytest.raises(BadRow, match="leaves out the tools; choose a model whose template has them"):
        template_of("deepseek-r1-distill").pieces(Example(CONVERSATIONS["pondering"], TOOLS))
    with pytest.raises(BadRow, match="refuses it: After the optional system message"):
        template_of("mistral-v0.3").pieces(Example(CONVERSATIONS["greeting"]))


def test_models_template_is_suggested_for_tools() -> None:
    tools = Example(CONVERSATIONS["tools"], TOOLS)
    with pytest.raises(BadRow, match="tool calls have no plain form; set template: chat, which has a form for it"):
        Template(tokenizer_of("qwen2.5"), prepare_settings(template="plain")).pieces(tools)
    tokenizer = tokenizer_like(FAMILIES["qwen2.5"], None)
    with pytest.raises(BadRow, match="tool calls have no plain form; choose a model that has a chat template"):
        Template(tokenizer, prepare_settings(template="plain")).pieces(tools)


# Turns with several headers, and tried remedies


def thinking(content: str, thoughts: str, *names: str) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"city": "Oslo"}}} for name in names
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    return {**message, "tool_calls": calls} if calls else message


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"3 by {name}", "tool_call_id": name}


def read(*messages: dict[str, Any], reading: Reading | None = None) -> Example:
    return parse({"messages": [*messages], "tools": TOOLS}, "messages", reading or Reading())


SEVERAL = [user("A?"), thinking("I say a.", "I think of a."), user("B?"), thinking("I say b.", "I think of b.")]
PARALLEL = [user("Weather?"), {**answer(""), "tool_calls": thinking("", "", "weather", "wind")["tool_calls"]}]


def test_an_answer_of_several_headers_begins_with_the_first() -> None:
    """gpt-oss writes <|start|>assistant before the thoughts, and again before the final answer."""
    example = read(
        user("Weather?"), thinking("", "Look it up.", "weather"), result("weather"), thinking("It is 3.", "Read off.")
    )
    assert marked(template_of("gpt-oss", "last").pieces(example)).endswith(
        "<|start|>assistant«<|channel|>analysis<|message|>Read off.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>»"
    )


def refused(template: Template, example: Example) -> str:
    with pytest.raises(BadRow) as caught:
        template.pieces(example)
    return str(caught.value)


def test_remedies_of_dropped_thoughts_are_tried() -> None:
    """Qwen3 drops the thoughts of earlier answers, also those inside the text."""
    assert refused(template_of("qwen3"), read(*SEVERAL)) == (
        "the chat template leaves out reasoning_content of the assistant message 2; set loss: last, or "
        "set ignore: [reasoning_content] to learn the answer without it"
    )
    assert "«<think>\nI think of b." in marked(template_of("qwen3", "last").pieces(read(*SEVERAL)))
    ignoring = Reading(ignored=frozenset({"reasoning_content"}))
    assert "«I say a.<|im_end|>»" in marked(template_of("qwen3").pieces(read(*SEVERAL, reading=ignoring)))


def test_remedies_that_fail_are_not_named() -> None:
    """gpt-oss writes no stop token after an earlier answer, whether it has thoughts or not."""
    assert refused(template_of("gpt-oss"), read(*SEVERAL)).endswith("of the assistant message 2; set loss: last")


def test_a_further_call_that_the_template_drops_is_named() -> None:
    row = read(*PARALLEL, result("weather"), result("wind"), answer("It is 3."))
    assert refused(template_of("gpt-oss", "last"), row) == (
        "the chat template leaves out call 2 of the 2 tool calls of the assistant message 2 ('wind'); write one call "
        "in each message, followed by its result"
    )
    first, second = ({**PARALLEL[1], "tool_calls": [call]} for call in PARALLEL[1]["tool_calls"])
    split = read(PARALLEL[0], first, result("weather"), second, result("wind"), answer("It is 3."))
    text = "".join(piece.text for piece in template_of("gpt-oss", "last").pieces(split))
    assert text.index("to=functions.weather<") < text.index("to=functions.wind<")
    assert template_of("qwen3").pieces(row)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_name_that_the_template_drops_is_refused(role: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), answer("Hello")]
    named = [{**message, "name": "Bo"} if message["role"] == role else message for message in messages]
    assert re.fullmatch(
        rf"the chat template leaves out the name 'Bo' of the {role} message \d; set ignore: \[name\]",
        refused(template_of("qwen3"), Example(named)),
    )
    writes = like("{% for m in messages %}<|im_start|>{{ m.name or m.role }} {{ m.content }}<|im_end|>{% endfor %}")
    assert "<|im_start|>Bo" in marked(Template(writes, options()).pieces(Example(named)))
    ignoring = Reading(ignored=frozenset({"name"}))
    assert template_of("qwen3").pieces(parse({"messages": named}, "messages", ignoring))
