"""vicuna: Vicuna v1.1 and v1.5."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="vicuna",
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
)
