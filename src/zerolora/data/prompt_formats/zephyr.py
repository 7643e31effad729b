"""zephyr: Zephyr, whose markers are plain text."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="zephyr",
    source="the chat template of zephyr-7b-beta",
    template="""{%- for message in messages -%}
{{- "<|" + message.role + "|>\\n" + message.content + eos_token + "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% endif -%}""",
    example="<|user|>\nHi</s>\n<|assistant|>\n«Hello</s>»",
)
