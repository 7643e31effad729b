"""Named prompt formats and user templates: text, mask and tokens."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from goldens import CONVERSATIONS, TOOLS, answer, marked, prepare_settings, user
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers_of import FAMILIES, Family, tokenizer_like, tokenizer_of

from zerolora import bounded
from zerolora.compat.transformers_patches import compile_template
from zerolora.config.settings import PrepareSettings
from zerolora.config.user_files import user_template
from zerolora.data import prompt_formats
from zerolora.data.encode import CONTEXT, Encoder
from zerolora.data.example import BadRow, Example
from zerolora.data.prompt_formats import CHECKED, PROMPT_FORMATS, PromptFormat
from zerolora.data.template import Template
from zerolora.errors import UserError
from zerolora.imports.templates import texts
from zerolora.model import architecture

MINE = "config/templates/mine.jinja"
SHIPPED = ROOT / "config/templates/question-answer.jinja"
PLAIN_TEXT = [name for name, each in PROMPT_FORMATS.items() if not each.tokens]
# Published templates with their tokenizers: tests/templates/SOURCES.md.
PUBLISHED = {
    "chatml": "chatml",
    "gemma": "gemma-3",
    "llama-2": "llama-2",
    "llama-3": "llama-3",
    "zephyr": "zephyr",
}
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# Our format and system prompt for each template of axolotl: tests/templates/axolotl/.
AXOLOTL = {
    "gemma3n": ("gemma", ""),
    "qwen_25": ("chatml", QWEN),
}
TALK = [{"role": "system", "content": "Be brief."}, *CONVERSATIONS["multi"]]
# Written by hand from the other sources: LLaMA-Factory, FastChat, DeepSeek-V3.
TALKS = {
    "alpaca": "<s>Be brief.\n\n### Instruction:\nWho are you?\n\n### Response:«I am Bo.</s>»\n\n"
    "### Instruction:\nAnd now?\n\n### Response:«Now I rest.</s>»",
    "alpaca-newline": "<s>Be brief.\n\n### Instruction:\nWho are you?\n\n### Response:\n«I am Bo.</s>»\n\n"
    "### Instruction:\nAnd now?\n\n### Response:\n«Now I rest.</s>»",
    "deepseek-3": "<s>Be brief.<｜User｜>Who are you?<｜Assistant｜>«I am Bo.</s>»"
    "<｜User｜>And now?<｜Assistant｜>«Now I rest.</s>»",
    "llama-3-verbatim": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«I am Bo.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Now I rest.<|eot_id|>»",
    "mistral": "<s>[INST] Be brief.\n\nWho are you?[/INST]« I am Bo.</s>»[INST] And now?[/INST]« Now I rest.</s>»",
    "vicuna": "<s>Be brief. USER: Who are you? ASSISTANT:« I am Bo.</s>»USER: And now? ASSISTANT:« Now I rest.</s>»",
}
CONTENT = st.lists(
    st.sampled_from(["Hi", " ", "\n", "\n\n", "a  b", "王大", "é", "USER: ", "[/INST]", "### Response:\n", "{{ x }}"]),
    min_size=1,
    max_size=5,
).map("".join)


def family_of(each: PromptFormat) -> Family:
    """Return a family whose tokenizer has a format's tokens, <s> and </s>."""
    return Family("llama3", "<s>", "</s>", ("<s>", "</s>", *each.tokens), opens=True)


def template_like(name: str, **changed: Any) -> Template:
    return Template(tokenizer_like(family_of(PROMPT_FORMATS[name]), None), prepare_settings(template=name, **changed))


def own(text: str, **changed: Any) -> PrepareSettings:
    return prepare_settings(template=MINE, template_text=text, **changed)


def plain_model(**changed: Any) -> Any:
    """Return the tokenizer of a base model: BOS and EOS, no chat template."""
    return tokenizer_like(Family("legacy", "<s>", "</s>", ("<s>", "</s>"), opens=True)._replace(**changed), None)


# Text


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_format_writes_its_example(name: str) -> None:
    pieces = template_like(name).pieces(Example(CONVERSATIONS["single"]))
    assert marked(pieces) == PROMPT_FORMATS[name].example


def test_every_format_is_compared_with_its_source() -> None:
    assert set(PUBLISHED) | set(TALKS) | {ours for ours, _ in AXOLOTL.values()} == set(PROMPT_FORMATS)


@pytest.mark.parametrize("name", TALKS)
def test_format_writes_conversation_with_system_prompt(name: str) -> None:
    assert marked(template_like(name).pieces(Example(TALK))) == TALKS[name]


@pytest.mark.parametrize("name", PUBLISHED)
@given(data=st.data())
@hypothesis_settings(max_examples=10)
def test_format_matches_published_template(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(PUBLISHED[name])
    here = Template(tokenizer, prepare_settings(template=name))
    there = Template(tokenizer, prepare_settings())
    messages = [{"role": "system", "content": data.draw(CONTENT)}] if data.draw(st.booleans()) else []
    for _ in range(data.draw(st.integers(1, 3))):
        messages += [user(data.draw(CONTENT)), answer(data.draw(CONTENT))]
    assert here.pieces(Example(messages)) == there.pieces(Example(messages))
    assert here.stops == there.stops


def of_axolotl(name: str, like: PromptFormat, opens: bool = True) -> Any:
    """Return a tokenizer with a format's tokens and a chat template of axolotl."""
    text = (ROOT / f"tests/templates/axolotl/{name}.jinja").read_text(encoding="utf-8")
    return tokenizer_like(family_of(like)._replace(opens=opens), text)


ALSO_WITHOUT_BOS = ("qwen_25",)
PAIRS = [*((name, True) for name in AXOLOTL), *((name, False) for name in ALSO_WITHOUT_BOS)]


@pytest.mark.parametrize(("name", "opens"), PAIRS)
@given(data=st.data())
@hypothesis_settings(max_examples=10)
def test_format_matches_axolotls_template(name: str, opens: bool, data: st.DataObject) -> None:
    """With a tokenizer that puts BOS before a text; with any, if the format always has BOS or never."""
    ours, system = AXOLOTL[name]
    tokenizer = of_axolotl(name, PROMPT_FORMATS[ours], opens)
    here = Template(tokenizer, prepare_settings(template=ours, system=system))
    there = Template(tokenizer, prepare_settings())
    messages = [{"role": "system", "content": data.draw(CONTENT)}] if data.draw(st.booleans()) else []
    for _ in range(data.draw(st.integers(1, 3))):
        messages += [user(data.draw(CONTENT)), answer(data.draw(CONTENT))]
    assert here.pieces(Example(messages)) == there.pieces(Example(messages))


@pytest.mark.parametrize("name", AXOLOTL)
def test_whitespace_is_stripped_where_axolotls_template_strips_it(name: str) -> None:
    ours, _ = AXOLOTL[name]
    tokenizer = of_axolotl(name, PROMPT_FORMATS[ours])
    messages = [{"role": "system", "content": " Be brief.\n"}, user("\n Hi "), answer(" Hello\n")]
    here, there = (Template(tokenizer, prepare_settings(template=each)) for each in (ours, "chat"))
    assert here.pieces(Example(messages)) == there.pieces(Example(messages))


def test_axolotls_qwen3_writes_what_the_models_own_template_writes() -> None:
    """With thoughts, tools and calls, of which the import says so."""
    own = tokenizer_of("qwen3")
    theirs = copy.deepcopy(own)
    theirs.chat_template = (ROOT / "tests/templates/axolotl/qwen3.jinja").read_text(encoding="utf-8")
    thought = [user("1 + 1?"), {**answer("2"), "reasoning_content": "Two."}]
    several = [*CONVERSATIONS.values(), thought, [*thought, user("And now?"), answer("<think>\nHm.\n</think>\n\n3")]]
    compared = 0
    for messages in several:
        for tools in None, TOOLS:
            here, there = (Template(each, prepare_settings())._writes(messages, tools) for each in (own, theirs))
            assert here == there
            compared += here is not None
    assert compared > 2 * len(several) - 8


COMPARED = {
    "command-r": [("axolotl", "cohere")],
    "gemma-3": [("axolotl", "gemma3")],
    "gemma-4": [("axolotl", "gemma4")],
    "phi-3": [("axolotl", "phi_35"), ("llamafactory", "phi")],
    "phi-4": [("llamafactory", "phi4")],
    "qwen2.5": [("axolotl", "qwen_25"), ("llamafactory", "qwen")],
    "qwen3": [("axolotl", "qwen3")],
}
"""Templates of other tools that write what a published model's own template writes."""


@pytest.mark.parametrize("name", COMPARED)
def test_own_template_is_compared_with_another_tools(name: str) -> None:
    """Of all templates of the tools, those alone pass that write the same, of which these are known."""
    tokenizer, passed = tokenizer_of(name), set()
    for tool in ("axolotl", "llamafactory"):
        for theirs, written in texts(tool).items():
            try:
                Template(tokenizer, prepare_settings(template_writes=written))
            except UserError as error:
                assert "but the chat template writes" in str(error) and "\n" not in str(error)
            else:
                passed.add((tool, theirs))
                filled = [text.replace("{bos_token}", tokenizer.bos_token or "") for text in written]
                own = tokenizer.apply_chat_template(CHECKED[0], tokenize=False)
                assert own.startswith(filled[0].replace("{eos_token}", tokenizer.eos_token).rstrip())
    assert passed >= set(COMPARED[name]) and len(passed) < 6


def test_texts_of_axolotls_templates_are_those_of_its_files() -> None:
    for path in (ROOT / "tests/templates/axolotl").glob("*.jinja"):
        program = compile_template(path.read_text(encoding="utf-8"))
        tokens = {"bos_token": "{bos_token}", "eos_token": "{eos_token}"}
        assert [program.render(messages=each, tools=None, **tokens) for each in CHECKED] == texts("axolotl")[path.stem]


def test_table_of_the_docs_is_the_registrys() -> None:
    assert prompt_formats.table() in (ROOT / "docs/data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_tool_calls_are_refused(name: str) -> None:
    without = "tool calls have no form in it; choose a model that has a chat template"
    with pytest.raises(BadRow, match=f"template {name} refuses it: {without}"):
        template_like(name).pieces(Example(CONVERSATIONS["calls"]))
    with pytest.raises(BadRow, match=f"template {name} leaves out the tools"):
        template_like(name).pieces(Example(CONVERSATIONS["single"], TOOLS))


@pytest.mark.parametrize("name", [name for name, each in PROMPT_FORMATS.items() if each.alternates])
def test_turns_must_alternate(name: str) -> None:
    for conversation in ("insisting", "greeting"):
        with pytest.raises(BadRow, match=f"template {name} refuses it: user and assistant must take turns"):
            template_like(name).pieces(Example(CONVERSATIONS[conversation]))


def test_verbatim_format_keeps_whitespace() -> None:
    """As LLaMA-Factory's StringFormatter does, which puts the content into its slot unchanged."""
    pieces = template_like("llama-3-verbatim").pieces(Example([user(" Hi \n"), answer("\n Hello ")]))
    assert marked(pieces) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\n Hi \n<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«\n Hello <|eot_id|>»"
    )


# Mask, over tokenizers of real families


def spelt(tokenizer: Any, template: Template, messages: list[dict[str, Any]]) -> tuple[list[str], list[int], Any]:
    """Return the decoded supervised turns, all tokens, and which tokens are supervised."""
    pieces = template.pieces(Example(messages))
    tokens = Encoder(tokenizer).encode([pieces])
    assert not tokens.wrong, tokens.wrong
    ids, supervised = tokens.ids[0], tokens.supervised_role != CONTEXT
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(int)))
    said = [tokenizer.decode(ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return said, ids.tolist(), supervised


@pytest.mark.parametrize("name", [*PROMPT_FORMATS, MINE])
def test_mask_of_a_format_on_every_tokenizer(name: str) -> None:
    """Answers and stop tokens are supervised, or the model lacks a token of the format."""
    text = SHIPPED.read_text(encoding="utf-8") if name == MINE else None
    needed = PROMPT_FORMATS[name].tokens if text is None else ()
    used = 0
    tokenizers = {family: tokenizer_of(family) for family in FAMILIES}
    if text is None:
        tokenizers["its own"] = tokenizer_like(family_of(PROMPT_FORMATS[name]), None)
    for family, tokenizer in tokenizers.items():
        options = prepare_settings(template=name, template_text=text)
        missing = [token for token in needed if token not in tokenizer.get_added_vocab()]
        if missing:
            with pytest.raises(UserError, match=f"template: {name} writes {re.escape(missing[0])}, which the model"):
                Template(tokenizer, options)
            continue
        used += 1
        template = Template(tokenizer, options)
        for conversation in ("single", "multi", "system", "unicode"):
            messages = CONVERSATIONS[conversation]
            said, ids, supervised = spelt(tokenizer, template, messages)
            answers = [message["content"] for message in messages if message["role"] == "assistant"]
            assert len(said) == len(answers), family
            for spoken, expected in zip(said, answers, strict=True):
                (stop,) = (stop for stop in template.stops if spoken.endswith(stop))
                assert spoken.removesuffix(stop).strip() == expected, family
            # The tokens before the last answer are the prompt of generation.
            asked = template.write(messages[:-1], prompt=True)
            last = np.flatnonzero(~supervised)[-1] + 1
            assert "".join(tokenizer.decode(ids[:last]).split()) == "".join(asked.split()), family
    assert used >= (len(FAMILIES) if not needed else 1)


@pytest.mark.parametrize("name", [*PROMPT_FORMATS, "plain", MINE])
@pytest.mark.parametrize("stops", [None, "given"])
def test_published_template_writes_the_same_in_transformers(name: str, stops: str | None) -> None:
    text = "\n  {% if true %}\n  {% endif %}" + SHIPPED.read_text(encoding="utf-8") if name == MINE else None
    for family in ("smollm2", "llama-2", "llama-3", "phi-4", "gemma-2", "qwen2.5", "deepseek-v3.1", "phi-3"):
        tokenizer = tokenizer_of(family)
        if name in PROMPT_FORMATS and not set(PROMPT_FORMATS[name].tokens) <= set(tokenizer.get_added_vocab()):
            continue
        template = Template(tokenizer, prepare_settings(template=name, template_text=text))
        if stops:
            tokens = [next(iter(tokenizer.get_added_vocab())), *sorted(template.stops)]
            template = Template(tokenizer, prepare_settings(template=name, template_text=text, stop_tokens=tokens))
        for messages in CONVERSATIONS["multi"], CONVERSATIONS["system"]:
            for prompt in (False, True):
                published: Any = tokenizer.apply_chat_template(
                    messages, chat_template=template.published(), tokenize=False, add_generation_prompt=prompt
                )
                bos = template.bos if name == "plain" else ""  # a separate piece in prepare
                assert published == bos + template.write(messages, prompt=prompt), family


def test_models_own_template_is_not_published() -> None:
    assert Template(tokenizer_of("llama-3"), prepare_settings()).published() is None


MARKERS = {name: [*re.findall(r"\[?[^«»\s]+\s*", each.example), "\n", "x "] for name, each in PROMPT_FORMATS.items()}


@pytest.mark.parametrize("name", PROMPT_FORMATS)
@given(data=st.data())
@hypothesis_settings(max_examples=20)
def test_markers_in_the_data_are_text(name: str, data: st.DataObject) -> None:
    """A row with the format's markers is masked as with other words, or refused for a special token."""
    evil = st.lists(st.sampled_from(MARKERS[name]), min_size=1, max_size=6).map("".join)
    contents = [data.draw(evil) for _ in range(4)]
    assume(all(content.strip() for content in contents))
    template = template_like(name)
    tokenizer = template.tokenizer
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if held := [content for content in contents if any(token in content for token in special.values())]:
        with pytest.raises(BadRow, match="contains the special token") as refused:
            template.pieces(Example(messages))
        assert f"message {contents.index(held[0]) + 1} contains" in str(refused.value)
        return
    words = [f"word{number}" for number in range(4)]
    innocent = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    expected = template.pieces(Example(innocent))
    strips = name in ("llama-2", "llama-3", "gemma")
    filled = dict(zip(words, [content.strip() if strips else content for content in contents], strict=True))

    def with_contents(text: str) -> str:
        return re.sub(r"word\d", lambda word: filled[word[0]], text)

    pieces = template.pieces(Example(messages))
    assert pieces == [piece._replace(text=with_contents(piece.text)) for piece in expected]
    # No special token comes from a content.
    seen, meant = (spelt(tokenizer, template, each)[1] for each in (messages, innocent))
    assert [each for each in seen if each in special] == [each for each in meant if each in special]


# Tokens


def test_missing_chat_template_lists_usable_formats() -> None:
    with pytest.raises(UserError) as refused:
        Template(plain_model(), prepare_settings())
    assert str(refused.value) == (
        f"the model's tokenizer has no chat template; set template: plain, {', '.join(PLAIN_TEXT)}, "
        "or a file as in config/templates/mine.jinja"
    )
    assert PLAIN_TEXT == ["alpaca", "alpaca-newline", "llama-2", "mistral", "vicuna", "zephyr"]


def test_missing_tokens_of_a_format_are_named() -> None:
    with pytest.raises(UserError) as refused:
        Template(plain_model(), prepare_settings(template="chatml"))
    assert str(refused.value) == (
        "template: chatml writes <|im_start|>, which the model does not have as one token; "
        f"use a format whose tokens it has: plain, {', '.join(PLAIN_TEXT)}; "
        'or add_special_tokens: ["<|im_start|>", "<|im_end|>"]'
    )


def rows_of(folder: Path, rows: int, **text: int) -> Path:
    """Write a config.json with this many embedding rows."""
    (folder / "config.json").write_text(
        json.dumps({"text_config": {"vocab_size": rows}} if text else {"vocab_size": rows})
    )
    return folder


@pytest.mark.parametrize("nested", [{}, {"of": 1}])
def test_token_beyond_embeddings_is_missing(tmp_path: Path, nested: dict[str, int]) -> None:
    """Tokens were added to the tokenizer, but the embeddings were not resized."""
    tokenizer = tokenizer_of("chatml")
    first = tokenizer.convert_tokens_to_ids("<|im_start|>")
    rows_of(tmp_path, first, **nested)
    with pytest.raises(UserError, match=r"chatml writes <\|im_start\|>, which the model does not have as one token"):
        Template(tokenizer, prepare_settings(template="chatml"), tmp_path)
    Template(tokenizer, prepare_settings(template="chatml"), rows_of(tmp_path, len(tokenizer), **nested))


def test_stop_tokens_replace_missing_eos() -> None:
    tokenizer = plain_model()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"no eos_token, so nothing would end an answer; set stop_tokens: \[TOKEN\]"):
        Template(tokenizer, prepare_settings(template="vicuna"))
    template = Template(tokenizer, prepare_settings(template="vicuna", stop_tokens=["</s>"]))
    assert marked(template.pieces(Example(TALK))) == TALKS["vicuna"]
    assert template.stops == {"</s>"}


def test_first_stop_token_replaces_eos() -> None:
    tokenizer = tokenizer_of("llama-3")
    template = Template(tokenizer, prepare_settings(template="alpaca", stop_tokens=["<|eot_id|>", "<|end_of_text|>"]))
    assert marked(template.pieces(Example(CONVERSATIONS["single"]))).endswith("### Response:«Hello<|eot_id|>»")
    assert marked(template.pieces(Example(text="Once"))) == "<|begin_of_text|>«Once<|eot_id|>»"
    assert template.stops == {"<|eot_id|>", "<|end_of_text|>"}


def test_plain_stop_token_is_refused_in_a_content() -> None:
    template = Template(tokenizer_of("qwen2.5"), prepare_settings(template="vicuna", stop_tokens=["</tool_call>"]))
    assert marked(template.pieces(Example(TALK))).endswith("« Now I rest.</tool_call>»")
    with pytest.raises(
        BadRow, match="user message 1 contains the special token </tool_call>, which would end or begin"
    ):
        template.pieces(Example([user("Hi </tool_call>"), answer("Hello")]))


@pytest.mark.parametrize("key", ["stop_tokens", "pad_token"])
def test_unknown_stop_or_pad_token_is_refused(key: str) -> None:
    value = "<pad>" if key == "pad_token" else ["<pad>"]
    with pytest.raises(UserError) as refused:
        Template(tokenizer_of("llama-3"), prepare_settings(**{key: value}))
    assert str(refused.value).startswith(f"{key}: '<pad>' is not a single token of the model; use one of <|begin_")


def test_stop_tokens_must_include_the_templates() -> None:
    with pytest.raises(UserError, match=r"stop_tokens: the chat template ends an answer with <\|eot_id\|>.*; add it"):
        Template(tokenizer_of("llama-3"), prepare_settings(stop_tokens=["<|end_of_text|>"]))


def test_end_of_turn_may_differ_from_eos() -> None:
    """As in a base model whose EOS ends documents."""
    tokenizer = tokenizer_of("llama-3")
    template = Template(tokenizer, prepare_settings(template="llama-3"))
    assert template.end == "<|end_of_text|>"
    assert template.stops == {"<|end_of_text|>", "<|eot_id|>"}


def test_pad_token_must_not_end_answers() -> None:
    with pytest.raises(UserError, match=r"pad_token: <\|eot_id\|> ends an answer; .* so use another, one of <\|begin"):
        Template(tokenizer_of("llama-3"), prepare_settings(**{"pad_token": "<|eot_id|>"}))


def test_padding_by_default_and_by_name(tmp_path: Path) -> None:
    tokenizer = plain_model()
    assert Template(tokenizer, prepare_settings(template="plain")).padding == "<s>"
    assert Template(tokenizer_of("llama-3"), prepare_settings(**{"pad_token": "<|eom_id|>"})).padding == "<|eom_id|>"
    tokenizer.pad_token = None
    assert Template(tokenizer, prepare_settings(template="plain")).padding == "</s>"
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(UserError, match=r"pad_token <pad> is token \d+, but the model's embeddings have \d+ rows; set"):
        Template(tokenizer, prepare_settings(template="plain"), rows_of(tmp_path, len(tokenizer) - 1))


# User templates


def test_shipped_template_is_in_the_docs() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    assert f"```jinja\n{text}```" in (ROOT / "docs/data.md").read_text(encoding="utf-8")
    template = Template(plain_model(), own(text))
    assert marked(template.pieces(Example(TALK))) == (
        "Be brief.\n\nQuestion: Who are you?\nAnswer:« I am Bo.</s>»\nQuestion: And now?\nAnswer:« Now I rest.</s>»"
    )


TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}%s\n{% endfor %}"


def test_unknown_end_of_answer_is_refused() -> None:
    text = TURNS.replace("%s", "<|im_end|>")
    with pytest.raises(
        UserError, match=r"mine.jinja: ends an answer with <\|im_end\|>, which .*eos_token.*, here </s>"
    ):
        Template(plain_model(), own(text))
    assert Template(tokenizer_of("chatml"), own(text)).stops == {"<|im_end|>"}
    assert Template(plain_model(), own(TURNS.replace("%s", "<|im_end|>{{ eos_token }}"))).stops == {"</s>"}


def test_earlier_answers_without_stop_token_are_refused() -> None:
    template = Template(plain_model(), own(TURNS.replace("%s", "")))
    assert marked(template.pieces(Example(CONVERSATIONS["single"]))).endswith("assistant:« Hello</s>»")
    with pytest.raises(BadRow, match=r"mine.jinja writes no stop token .* write \{\{ eos_token \}\} there"):
        template.pieces(Example(CONVERSATIONS["multi"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{% for message in messages %}\n{{ message.content.nothing.at_all }}{% endfor %}",
            "mine.jinja:2: .*no attribute",
        ),
        ("\n\n{{ raise_exception('no  such\nthing') }}", "mine.jinja:3: no such thing"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "mine.jinja:1: .*unsafe"),
        ("{{ namespace(__init__=1) }}", "mine.jinja:1: .*underscore"),
        ("{{ messages.append(1) }}", "mine.jinja:1: .*unsafe"),
        ("\n{% include '/etc/passwd' %}", "mine.jinja:2: .*loader"),
        ("{{ open('/etc/passwd') }}", "mine.jinja:1: 'open' is undefined"),
        ("{{ cycler.__init__.__globals__ }}", "mine.jinja:1: .*unsafe"),
        (
            "{% for message in messages[1:] %}{{ message.content }}{{ eos_token }}{% endfor %}",
            "leaves out the user mes",
        ),
    ],
)
def test_template_error_names_its_line(text: str, said: str) -> None:
    with pytest.raises(BadRow, match=said) as refused:
        Template(plain_model(), own(text)).pieces(Example(CONVERSATIONS["single"]))
    assert MINE in str(refused.value)
    assert "\n" not in str(refused.value)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOOP, "takes more than 0.2 s for one conversation; shorten its loops"),
        ("{{ 'a' * 10**10 }}", "takes more than 1 GiB for one conversation; shorten its output"),
        ("{{ '%10000000000d' % 1 }}", "takes more than 1 GiB for one conversation; shorten its output"),
        ("{{ 'a'.center(10**10) }}", "takes more than 1 GiB for one conversation; shorten its output"),
        ("{{ messages[0].content * 2000 }}", "writes 2,000 characters for one conversation; shorten its output"),
    ],
)
def test_template_is_bounded_in_time_and_size(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    monkeypatch.setattr(bounded, "LONGEST", 1000)
    with pytest.raises(UserError) as refused:
        Template(plain_model(), own(text))
    assert str(refused.value) == f"{MINE}: {said}"
    tokenizer = plain_model()
    tokenizer.chat_template = text
    with pytest.raises(UserError) as refused:
        Template(tokenizer, prepare_settings(template="chat"))
    assert str(refused.value) == f"the chat template: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOOP, "the chat template: takes more than 0.2 s for one conversation; shorten its loops"),
        (
            "{{ 'a'.center(10**10) }}",
            "the chat template: takes more than 1 GiB for one conversation; shorten its output",
        ),
        (
            "{{ messages[0].content * 2000 }}",
            "the chat template: writes 4,000 characters for one conversation; shorten its output",
        ),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
        (
            "{{ 1 + messages[0].content }}",
            "the chat template refuses it: unsupported operand type(s) for +: 'int' and 'str'",
        ),
        (
            "{{ ().__class__.__mro__ }}",
            "the chat template refuses it: access to attribute '__class__' of 'tuple' object is unsafe.",
        ),
    ],
)
def test_models_template_is_bounded_and_fails_in_one_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    monkeypatch.setattr(bounded, "LONGEST", 1000)
    tokenizer = architecture.tokenizer_of(tiny_model)
    with pytest.raises(UserError) as refused:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=text, tokenize=False)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ": there is no such file; correct the path, or put a chat template there"),
        (b"", ": is empty; write a chat template, as in docs/data.md"),
        (b"{{ \xff }}", ": byte 3 is not UTF-8; save the file as UTF-8"),
        (b"a" * 100_001, ": has 100,001 characters; use at most 100,000"),
        (b"a\n{% for x in messages %}", ":2: no Jinja template: Unexpected end of template.*; correct that line"),
        (b"\n{{ x | nothing }}", ":2: no Jinja template: No filter named 'nothing'.*; correct that line"),
        (b"{% generation %}", ":1: no Jinja template: Unexpected end"),
        (b"{{ " + b"(" * 9000 + b"1" + b")" * 9000 + b" }}", ": is nested too deep; nest fewer blocks inside each"),
    ],
)
def test_broken_template_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(MINE).parent.mkdir(parents=True)
    if content is not None:
        Path(MINE).write_bytes(content)
    with pytest.raises(UserError, match=f"^{MINE}{said}") as refused:
        user_template(MINE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "tests/templates").glob("*.jinja")))
def test_real_templates_are_accepted_as_user_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The config accepts transformers' template syntax, with its tags and filters."""
    monkeypatch.chdir(tmp_path)
    Path(MINE).parent.mkdir(parents=True)
    text = (ROOT / "tests/templates" / name).read_bytes()
    Path(MINE).write_bytes(text)
    assert user_template(MINE) == text.decode()
