"""chatml: ChatML, in which OpenAI wrote chats down, and which Qwen, Yi and SmolLM2 use."""

from zerolora.data.prompt_formats.definition import PromptFormat

FORMAT = PromptFormat(
    name="chatml",
    source="the chat template of OpenHermes-2.5-Mistral-7B; LLaMA-Factory's `chatml`",
    tokens=("<|im_start|>", "<|im_end|>"),
    template="""{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}""",
    example="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello<|im_end|>»",
)
