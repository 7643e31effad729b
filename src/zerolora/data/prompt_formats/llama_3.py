"""llama-3: Llama 3 Instruct."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="llama-3",
    source="the chat template of Meta-Llama-3-8B-Instruct",
    tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    template="""{{- bos_token -}}
{%- for message in messages -%}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content.strip() + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif -%}""",
    example=(
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello<|eot_id|>»"
    ),
)
