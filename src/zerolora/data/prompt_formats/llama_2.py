"""llama-2: Llama 2 Chat, whose markers are plain text."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="llama-2",
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
)
