"""alpaca: Stanford Alpaca's instruction, input and response, for several turns too."""

from zerolora.data.prompt_formats.definition import PromptFormat

INPUT = "\n\n### Input:\n"

FORMAT = PromptFormat(
    name="alpaca",
    source="PROMPT_DICT of Stanford Alpaca's `train.py`, with and without input",
    template="""{{- bos_token -}}
{%- if messages and messages[0].role != "system" -%}
{%- if "\\n\\n### Input:\\n" in messages[0].content -%}
{{- "Below is an instruction that describes a task, paired with an input that provides further context. " -}}
{%- else -%}
{{- "Below is an instruction that describes a task. " -}}
{%- endif -%}
{{- "Write a response that appropriately completes the request.\\n\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{- message.content + "\\n\\n" -}}
{%- elif message.role == "user" -%}
{{- "### Instruction:\\n" + message.content + "\\n\\n" -}}
{%- else -%}
{{- "### Response:" + message.content + eos_token + "\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "### Response:" }}{% endif -%}""",
    example=(
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nHi\n\n### Response:«Hello</s>»"
    ),
    input=INPUT,
)
