"""The prompts of a task's rows, and the tokens of what follows them, as in lm-evaluation-harness 0.4.13."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerolora.data.template_variables import has_value
from zerolora.errors import UserError

DEFAULT_LENGTH = 2048  # tokens, for a model without max_position_embeddings
DATE = "26 Jul 2024"  # today's date for chat templates, so that prompts do not change from day to day
BEFORE_CHOICE = " "
"""Between a plain prompt and a choice."""


def rows_in(file: Path) -> list[dict[str, Any]]:
    """Return the rows that the stage task_rows has written."""
    with file.open(encoding="utf-8") as lines:  # splitlines() also splits at U+2028 and others
        return [json.loads(line) for line in lines]


def prompts_of(rows: Iterable[dict[str, Any]], tokenizer: Any) -> list[str]:
    """Return the prompt of each row, by the tokenizer's chat template if there is a tokenizer. Raises UserError, naming
    the row, if the template rejects it."""
    if tokenizer is None:
        return [str(row["prompt"]) for row in rows]
    if not tokenizer.chat_template and any(row["messages"] for row in rows):
        raise UserError("the model's tokenizer has no chat template; set chat_template: false")
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    if not has_value(tokenizer.chat_template, "date_string"):  # of template_arguments
        how["date_string"] = DATE
    prompts = []
    for row in rows:
        try:
            text = tokenizer.apply_chat_template(row["messages"], **how) if row["messages"] else row["prompt"]
        except UserError as error:
            raise UserError(f"{row['place']}: {error}; correct the row, or set chat_template: false") from None
        prompts.append(str(text))
    return prompts


def longest_input(config: Any) -> int:
    """Return the maximum number of tokens of a model's input, by its config."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_LENGTH)


def first_token(tokenizer: Any) -> int:
    """Return the token before a text without a prompt."""
    number = tokenizer.bos_token_id
    return int(tokenizer.eos_token_id if number is None else number)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text. One that begins with the BOS token gets no other (HFLM.tok_encode)."""
    # A chat template already writes the BOS token.
    own = text.startswith(tokenizer.decode(first_token(tokenizer)))
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False) if own else tokenizer.encode(text)
    return tokens


def encoded(tokenizer: Any, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and continuation. Trailing white space of the prompt belongs to the continuation."""
    kept = prompt.rstrip()
    if not prompt:
        tokens = tokenizer.encode(continuation, add_special_tokens=False)
        first = first_token(tokenizer)
        return ([first], tokens) if tokens[0] != first else (tokens[:1], tokens[1:])
    whole, before = tokens_of(tokenizer, prompt + continuation), tokens_of(tokenizer, kept)
    return before, whole[len(before) :]
