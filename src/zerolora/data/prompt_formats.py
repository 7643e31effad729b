"""The well-known prompt formats of `prepare.template`, one entry of a table each, for models without a chat template.

To add a format, add an entry (docs/extending.md). The config, its JSON Schema and docs/data.md are generated from the
table. Nothing here imports torch or transformers.
"""

from dataclasses import dataclass

# Before every template: refuses messages that no format of the table supports.
CHECKS = """{%- for message in messages if message.tool_calls or message.role == "tool" -%}
{{- raise_exception("tool calls have no form in it; set template: chat") -}}
{%- endfor -%}
"""
ALTERNATION = """{%- for message in (messages[1:] if messages and messages[0].role == "system" else messages) -%}
{%- if message.role != ("user" if loop.index is odd else "assistant") -%}
{{- raise_exception("user and assistant must take turns in it, after one system prompt at most") -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class PromptFormat:
    """A well-known prompt format.

    about: description for the reference. source: its publication. template: Jinja chat template of transformers;
    `bos_token` is empty if the tokenizer adds none to a text. tokens: special tokens that the model must have, besides
    BOS and the end of sequence. example: the question Hi and the answer Hello in this format, for a tokenizer with BOS
    <s> and end of sequence </s>, with the supervised text in « ». alternates: user and assistant must take turns.
    input: the separator of an instruction and its input.
    """

    name: str
    about: str
    source: str
    template: str
    example: str
    tokens: tuple[str, ...] = ()
    alternates: bool = False
    input: str = "\n"

    @property
    def jinja(self) -> str:
        """The template after the checks of its messages."""
        return CHECKS + (ALTERNATION if self.alternates else "") + self.template


_ALPACA = """{{- bos_token -}}
{%- if messages and messages[0].role != "system" -%}
{%- if "\\n\\n### Input:\\n" in messages[0].content -%}
{{- "Below is an instruction that describes a task, paired with an input that provides further context. " -}}
{%- else -%}
{{- "Below is an instruction that describes a task. " -}}
{%- endif -%}
{{- "Write a response that appropriately completes the request.\\n\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content + "\\n\\n" -}}
{%- elif message.role == "user" -%}
{{- "### Instruction:\\n" + message.content + "\\n\\n" -}}
{%- else -%}
{{- "### Response:RESPONSE" + message.content + eos_token + "\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "### Response:RESPONSE" }}{% endif -%}"""

_LLAMA_3 = """{{- bos_token -}}
{%- for message in messages -%}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content.strip() + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif -%}"""

_TABLE = (
    PromptFormat(
        name="alpaca",
        about="Stanford Alpaca's instruction, input and response, for several turns too",
        source="PROMPT_DICT of Stanford Alpaca's `train.py`, with and without input",
        template=_ALPACA.replace("RESPONSE", ""),
        example=(
            "<s>Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request."
            "\n\n### Instruction:\nHi\n\n### Response:«Hello</s>»"
        ),
        input="\n\n### Input:\n",
    ),
    PromptFormat(
        name="alpaca-newline",
        about="alpaca with a line break before each response, which most tools write",
        source="AlpacaPrompter of axolotl's `prompters.py`",
        template=_ALPACA.replace("RESPONSE", "\\n"),
        example=(
            "<s>Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request."
            "\n\n### Instruction:\nHi\n\n### Response:\n«Hello</s>»"
        ),
        input="\n\n### Input:\n",
    ),
    PromptFormat(
        name="chatml",
        about="ChatML, in which OpenAI wrote chats down",
        source="the chat template of OpenHermes-2.5-Mistral-7B; LLaMA-Factory's `chatml`",
        tokens=("<|im_start|>", "<|im_end|>"),
        template="""{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}""",
        example="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello<|im_end|>»",
    ),
    PromptFormat(
        name="deepseek-3",
        about="DeepSeek-V3, and R1, whose own template drops the thoughts of answers",
        source="the chat template of DeepSeek-V3; LLaMA-Factory's `deepseek3`",
        tokens=("<｜User｜>", "<｜Assistant｜>"),
        template="""{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content -}}
{%- elif message.role == "user" -%}
{{- "<｜User｜>" + message.content -}}
{%- else -%}
{{- "<｜Assistant｜>" + message.content + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<｜Assistant｜>" }}{% endif -%}""",
        example="<s><｜User｜>Hi<｜Assistant｜>«Hello</s>»",
    ),
    PromptFormat(
        name="gemma",
        about="Gemma 2 and 3, with a system prompt in the first turn",
        source="the chat templates of gemma-2-2b-it and, with a system prompt, gemma-3",
        alternates=True,
        tokens=("<start_of_turn>", "<end_of_turn>"),
        template="""{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- set system = loop.previtem if loop.previtem and loop.previtem.role == "system" -%}
{{- "<start_of_turn>user\\n" + (system.content + "\\n\\n" if system else "") -}}
{{- message.content.strip() + "<end_of_turn>\\n" -}}
{%- elif message.role == "assistant" -%}
{{- "<start_of_turn>model\\n" + message.content.strip() + "<end_of_turn>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<start_of_turn>model\\n" }}{% endif -%}""",
        example="<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello<end_of_turn>»",
    ),
    PromptFormat(
        name="llama-2",
        about="Llama 2 Chat, whose markers are plain text",
        source="the chat template of Llama-2-7b-chat-hf; FastChat's `llama-2`",
        alternates=True,
        template="""{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- set system = loop.previtem if loop.previtem and loop.previtem.role == "system" -%}
{%- set told = "<<SYS>>\\n" + system.content + "\\n<</SYS>>\\n\\n" if system else "" -%}
{{- bos_token + "[INST] " + (told + message.content).strip() + " [/INST]" -}}
{%- elif message.role == "assistant" -%}
{{- " " + message.content.strip() + " " + eos_token -}}
{%- endif -%}
{%- endfor -%}""",
        example="<s>[INST] Hi [/INST]« Hello </s>»",
    ),
    PromptFormat(
        name="llama-3",
        about="Llama 3 Instruct",
        source="the chat template of Meta-Llama-3-8B-Instruct",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        template=_LLAMA_3,
        example=(
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello<|eot_id|>»"
        ),
    ),
    PromptFormat(
        name="llama-3-verbatim",
        about="llama-3 with the whitespace around a message",
        source="LLaMA-Factory's `llama3`",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        template=_LLAMA_3.replace(".strip()", ""),
        example=(
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello<|eot_id|>»"
        ),
    ),
    PromptFormat(
        name="mistral",
        about="Mistral Instruct v0.3 (tokenizer v3)",
        source="the chat template of Mistral-7B-Instruct-v0.3; with a system prompt, LLaMA-Factory's `mistral`",
        alternates=True,
        template="""{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- set system = loop.previtem if loop.previtem and loop.previtem.role == "system" -%}
{{- "[INST] " + (system.content + "\\n\\n" if system else "") + message.content + "[/INST]" -}}
{%- elif message.role == "assistant" -%}
{{- " " + message.content + eos_token -}}
{%- endif -%}
{%- endfor -%}""",
        example="<s>[INST] Hi[/INST]« Hello</s>»",
    ),
    PromptFormat(
        name="vicuna",
        about="Vicuna v1.1 and v1.5",
        source="FastChat's `vicuna_v1.1`",
        template="""{{- bos_token -}}
{%- if messages and messages[0].role != "system" -%}
{{- "A chat between a curious user and an artificial intelligence assistant. " -}}
{{- "The assistant gives helpful, detailed, and polite answers to the user's questions. " -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content + " " -}}
{%- elif message.role == "user" -%}
{{- "USER: " + message.content + " " -}}
{%- else -%}
{{- "ASSISTANT: " + message.content + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "ASSISTANT:" }}{% endif -%}""",
        example=(
            "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:« Hello</s>»"
        ),
    ),
    PromptFormat(
        name="zephyr",
        about="Zephyr, whose markers are plain text",
        source="the chat template of zephyr-7b-beta",
        template="""{%- for message in messages -%}
{{- "<|" + message.role + "|>\\n" + message.content + eos_token + "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% endif -%}""",
        example="<|user|>\nHi</s>\n<|assistant|>\n«Hello</s>»",
    ),
)
PROMPT_FORMATS = {each.name: each for each in _TABLE}
"""Every prompt format by name."""
_TURNS = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": " Hello "},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye"},
]
CHECKED = (_TURNS, [{"role": "system", "content": " Be brief. "}, *_TURNS])
"""The conversations whose texts `prepare.template_writes` gives, with blanks that some templates strip."""


def table() -> str:
    """Return the table of docs/data.md: an exchange in each format, its special tokens, and its source."""
    lines = ["| template | Hi and Hello | tokens it needs | as in |", "|---|---|---|---|"]
    for name, each in PROMPT_FORMATS.items():
        example = each.example.replace("\n", "⏎").replace("|", "\\|")
        tokens = ", ".join(f"`{token}`" for token in each.tokens).replace("|", "\\|") or "none"
        lines.append(f"| `{name}` | `{example}` | {tokens} | {each.source} |")
    return "\n".join(lines)
