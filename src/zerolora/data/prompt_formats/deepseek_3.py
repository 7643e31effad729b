"""deepseek-3: DeepSeek-V3, without thoughts."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="deepseek-3",
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
)
