"""alpaca: Stanford Alpaca's instruction and response, for several turns too."""

from zerolora.data.prompt_formats.base import PromptFormat

FORMAT = PromptFormat(
    name="alpaca",
    source="PROMPT_DICT of Stanford Alpaca's `train.py`; LLaMA-Factory's `alpaca`",
    template="""{{- bos_token -}}
{%- if messages and messages[0].role != "system" -%}
{{- "Below is an instruction that describes a task. " -}}
{{- "Write a response that appropriately completes the request.\\n\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content + "\\n\\n" -}}
{%- elif message.role == "user" -%}
{{- "### Instruction:\\n" + message.content + "\\n\\n" -}}
{%- else -%}
{{- "### Response:\\n" + message.content + eos_token + "\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "### Response:\\n" }}{% endif -%}""",
    example=(
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nHi\n\n### Response:\n«Hello</s>»"
    ),
)
