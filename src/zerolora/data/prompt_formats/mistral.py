"""mistral: Mistral Instruct v0.3 (tokenizer v3)."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="mistral",
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
)
