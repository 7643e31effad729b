"""Lets a merged model be asked, and stop, as the rows that it was trained on: its chat template and its stop tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zerolora.files import MANIFEST, read_json, write_json, write_text


def write_prompt_format(data: Path, model: Path) -> None:
    """Write the chat template of prepared `data` into the directory `model`, and its stop tokens to generation_config.

    Nothing is written where the rows were made with the model's own template, and end with tokens at which it stops.
    """
    prepared = read_json(data / MANIFEST, "zerolora prepare")
    if prepared["chat_template"] is not None:
        write_text(model / "chat_template.jinja", prepared["chat_template"])
    path = model / "generation_config.json"
    generation: dict[str, Any] = read_json(path, "save_pretrained") if path.is_file() else {}
    config = read_json(model / "config.json", "save_pretrained")
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [] if found is None else found if isinstance(found, list) else [found]
    # The stop tokens are tokens of the tokenizer (data/special_tokens.py).
    numbers = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab() if prepared["stop_tokens"] else {}
    taught = sorted(numbers[token] for token in prepared["stop_tokens"])
    if not set(taught) <= set(ends):
        write_json(path, generation | {"eos_token_id": [*ends, *(number for number in taught if number not in ends)]})
