"""Ollama's Modelfile: the prompt format of a merged model as a Go template, its stop tokens, and a system prompt."""

from pathlib import Path
from typing import Any

from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.errors import UserError, shown
from zerolora.model.architecture import tokenizer_of

QUOTES = '"""'
# In Go's text/template, by name of the prompt format (data/prompt_formats.py). BOS is left out: llama.cpp writes it
# where the tokenizer does. Formats whose system prompt lies in the first turn of the user are not among them.
GO_TEMPLATES = {
    "chatml": "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n",
    "llama-3": "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}"
    "<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n",
    "phi-3": "{{ range .Messages }}<|{{ .Role }}|>\n{{ .Content }}<|end|>\n{{ end }}<|assistant|>\n",
    "phi-4": "{{ range .Messages }}<|im_start|>{{ .Role }}<|im_sep|>{{ .Content }}<|im_end|>{{ end }}"
    "<|im_start|>assistant<|im_sep|>",
    "zephyr": "{{ range .Messages }}<|{{ .Role }}|>\n{{ .Content }}{EOS}\n{{ end }}<|assistant|>\n",
}
TRIED: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ],
)
"""Conversations by which a chat template is recognized: in each, it writes what a known format does."""


def modelfile(tokenizer: Any, stops: list[int], system: str | None, gguf: str) -> tuple[str, str | None]:
    """Return the Modelfile of a model in the file `gguf`, and the name of its prompt format, None if it is not known.

    Without a known format no TEMPLATE is written, and Ollama looks for one that fits the GGUF file's own chat template.
    Raises UserError for a stop token or a system prompt that a Modelfile cannot hold.
    """
    lines = [f"FROM ./{gguf}"]
    known = prompt_format(tokenizer)
    if known:
        template = GO_TEMPLATES[known].replace("{EOS}", tokenizer.eos_token or "")
        lines.append(f"TEMPLATE {_quoted(template, 'the end-of-sequence token')}")
    for token in tokenizer.convert_ids_to_tokens(stops):
        if any(character in token for character in '"\\\r\n'):
            raise UserError(
                f"prepare: stop token {shown(token)} contains a quote, a backslash or a line end, which a Modelfile "
                "cannot write; choose another stop token, or export gguf alone"
            )
        lines.append(f'PARAMETER stop "{token}"')
    if system:
        lines.append(f"SYSTEM {_quoted(system, 'export.ollama.system')}")
    return "\n".join(lines) + "\n", known


def prompt_format(tokenizer: Any) -> str | None:
    """Return the known format that a tokenizer's chat template writes, by what it makes of conversations."""
    if not tokenizer.chat_template:
        return None
    own = _written(tokenizer, tokenizer.chat_template)
    return next((name for name in GO_TEMPLATES if own and _written(tokenizer, PROMPT_FORMATS[name].jinja) == own), None)


def stop_tokens(generation: Any) -> list[int]:
    """Return the tokens at which a model stops, by its generation config."""
    result = generation.eos_token_id
    return [] if result is None else list(result) if isinstance(result, list) else [result]


def _written(tokenizer: Any, template: str) -> list[str] | None:
    from jinja2 import TemplateError

    try:
        texts = [
            tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=True)
            for chat in TRIED
        ]
    except TemplateError:
        return None
    bos = tokenizer.bos_token or ""
    return [text.removeprefix(bos) if not text.removeprefix(bos).startswith(bos) else text for text in texts]


def _quoted(text: str, what: str) -> str:
    """Return a text in triple quotes, which nothing escapes."""
    if QUOTES in text or text.endswith('"'):
        raise UserError(f"{what}: {shown(text)} holds {QUOTES} or ends in a quote; leave that out")
    return f"{QUOTES}{text}{QUOTES}"


def write(model: Path, output: Path, system: str | None, gguf: str) -> str | None:
    """Write the Modelfile of the merged model in directory `model` into `output`, and return its prompt format."""
    from transformers import GenerationConfig

    tokenizer = tokenizer_of(model)
    generation = GenerationConfig.from_pretrained(model, local_files_only=True)
    text, known = modelfile(tokenizer, stop_tokens(generation), system, gguf)
    (output / "Modelfile").write_text(text, encoding="utf-8")
    return known
