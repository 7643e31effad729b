"""phi-4: Phi-4."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="phi-4",
    source="the chat template of phi-4",
    tokens=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    template="""{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "<|im_sep|>" + message.content + "<|im_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant<|im_sep|>" }}{% endif -%}""",
    example="<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>«Hello<|im_end|>»",
)
