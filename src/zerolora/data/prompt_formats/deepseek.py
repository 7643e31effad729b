"""deepseek: DeepSeek LLM and DeepSeek-V2 Chat, whose markers are plain text."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="deepseek",
    source="the chat template of DeepSeek-V2-Chat; LLaMA-Factory's `deepseek`",
    template="""{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content + "\\n\\n" -}}
{%- elif message.role == "user" -%}
{{- "User: " + message.content + "\\n\\n" -}}
{%- else -%}
{{- "Assistant: " + message.content + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "Assistant:" }}{% endif -%}""",
    example="<s>User: Hi\n\nAssistant:« Hello</s>»",
)
