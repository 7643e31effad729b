"""gemma: Gemma 2 and 3, with a system prompt in the first turn."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="gemma",
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
)
