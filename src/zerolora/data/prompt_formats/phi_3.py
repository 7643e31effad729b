"""phi-3: Phi-3 Instruct."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="phi-3",
    source="the chat template of Phi-3-mini-4k-instruct",
    tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    template="""{%- for message in messages -%}
{{- "<|" + message.role + "|>\\n" + message.content + "<|end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% endif -%}""",
    example="<|user|>\nHi<|end|>\n<|assistant|>\n«Hello<|end|>»",
)
