"""ollama: a GGUF file with a Modelfile, for `ollama create NAME -f Modelfile`.

The Modelfile has the prompt format as a Go template, the stop tokens, and a system prompt.
"""

import tempfile
from pathlib import Path
from typing import Any

from zerolora.config.target_sections import Ollama
from zerolora.errors import UserError, shown
from zerolora.export import llama_cpp, opened
from zerolora.export.targets.gguf import FILE
from zerolora.export.targets.target import ExportTarget, Opened, RunResult
from zerolora.log import LOGGER
from zerolora.model.architecture import tokenizer_of

QUOTES = '"""'
# Well-known chat templates in Go's text/template, without BOS, which llama.cpp adds if the tokenizer does. Those that
# put the system prompt into the user's first turn are missing.
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
JINJA = {
    "{{ range .Messages }}": "{% for message in messages %}", "{{ end }}": "{% endfor %}", "{EOS}": "{{ eos_token }}",
    "{{ .Role }}": "{{ message.role }}", "{{ .Content }}": "{{ message.content }}",
}  # fmt: skip
"""The same in Jinja, by what GO_TEMPLATES use."""
TRIED: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ],
)
"""Conversations for which a chat template must render the same text as a known format."""


def _check(source: RunResult, settings: Ollama) -> None:
    llama_cpp.check_types(settings.type, "export.ollama.type")
    with tempfile.TemporaryDirectory() as folder:
        _write_modelfile(source.merged_model, Path(folder), settings.system)


def _try_out(source: RunResult, settings: Ollama) -> None:
    llama_cpp.try_conversion(source.merged_model)


def _run(source: RunResult, settings: Ollama, output: Path) -> dict[str, Any]:
    llama_cpp.write_gguf(source.merged_model, output / FILE, settings.type)
    known = _write_modelfile(source.merged_model, output, settings.system)
    if known is None:
        LOGGER.warning(
            "export: ollama: the model's chat template is not one of %s, so the Modelfile has no TEMPLATE; Ollama "
            "searches for one that matches the template in the GGUF file",
            ", ".join(GO_TEMPLATES),
        )
    return {"type": settings.type, "prompt_format": known}


def _opened(source: RunResult, settings: Ollama, output: Path) -> Opened:
    return opened.gguf(output / FILE)


def modelfile(tokenizer: Any, stops: list[int], system: str | None, gguf: str) -> tuple[str, str | None]:
    """Return the Modelfile for the file `gguf`, and the name of the model's prompt format, None if unknown.

    Without a known format there is no TEMPLATE, and Ollama searches for one that matches the GGUF file's chat template.
    Raises UserError for a stop token or a system prompt that a Modelfile cannot express.
    """
    lines = [f"FROM ./{gguf}"]
    known = prompt_format(tokenizer)
    if known:
        template = GO_TEMPLATES[known].replace("{EOS}", tokenizer.eos_token or "")
        lines.append(f"TEMPLATE {_quoted(template, 'the end-of-sequence token')}")
    for token in tokenizer.convert_ids_to_tokens(stops):
        if any(character in token for character in '"\\\r\n'):
            raise UserError(
                f"prepare: stop token {shown(token)} contains a quote, a backslash or a line break, which a Modelfile "
                "cannot express; choose another stop token, or export gguf only"
            )
        lines.append(f'PARAMETER stop "{token}"')
    if system:
        lines.append(f"SYSTEM {_quoted(system, 'export.ollama.system')}")
    return "\n".join(lines) + "\n", known


def prompt_format(tokenizer: Any) -> str | None:
    """Return the known format that renders TRIED as a tokenizer's chat template does, None if there is none."""
    if not tokenizer.chat_template:
        return None
    own = _written(tokenizer, tokenizer.chat_template)
    return next((name for name, text in GO_TEMPLATES.items() if own and _written(tokenizer, _jinja(text)) == own), None)


def _jinja(template: str) -> str:
    """Return one of GO_TEMPLATES as a chat template of transformers."""
    for there, here in JINJA.items():
        template = template.replace(there, here)
    return template + "{{ '' }}"  # which keeps a line break before it


def stop_tokens(generation: Any) -> list[int]:
    """Return the stop tokens of a generation config."""
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
    """Return a text in triple quotes, in which nothing can be escaped."""
    if QUOTES in text or text.endswith('"'):
        raise UserError(f"{what}: {shown(text)} contains {QUOTES} or ends with a quote; remove it")
    return f"{QUOTES}{text}{QUOTES}"


def _write_modelfile(model: Path, output: Path, system: str | None) -> str | None:
    """Write the Modelfile of the model in directory `model` to `output`, and return its prompt format."""
    from transformers import GenerationConfig

    tokenizer = tokenizer_of(model)
    generation = GenerationConfig.from_pretrained(model, local_files_only=True)
    text, known = modelfile(tokenizer, stop_tokens(generation), system, FILE)
    (output / "Modelfile").write_text(text, encoding="utf-8")
    return known


TARGET = ExportTarget(
    "ollama", "a GGUF file with Ollama's Modelfile", Ollama, _check, _run, _opened, of_merged=True, try_out=_try_out
)
