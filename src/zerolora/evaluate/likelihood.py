"""The likelihood of texts under a causal model, as in lm-evaluation-harness 0.4.13."""

from collections.abc import Sequence
from typing import Any

import torch

from zerolora.evaluate.tasks.task import Likelihood
from zerolora.progress import Progress

DEFAULT_LENGTH = 2048  # tokens, for a model without max_position_embeddings


def of_continuations(model: Any, tokenizer: Any, asked: Sequence[tuple[str, str, str]], batch: int) -> list[Likelihood]:
    """Return the likelihood of each continuation after its prompt.

    asked: (prompt, continuation, text), where `text` is the continuation without leading white space. Prompts that
    begin with the BOS token get no other (HFLM.tok_encode).
    """
    pairs = [_encoded(tokenizer, prompt, continuation) for prompt, continuation, _ in asked]
    sums = _sums(model, pairs, batch)
    return [
        Likelihood(text, total, len(tokens))
        for (_, _, text), (_, tokens), total in zip(asked, pairs, sums, strict=True)
    ]


def of_texts(model: Any, tokenizer: Any, texts: Sequence[str], batch: int) -> list[Likelihood]:
    """Return the likelihood of each whole text, in windows of the model's length without overlap
    (HFLM.loglikelihood_rolling)."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    first, longest = _prefix(tokenizer), longest_input(model)
    encoded = [_tokens(tokenizer, text) for text in texts]
    windows = [
        (number, *make_disjoint_window(pair))
        for number, tokens in enumerate(encoded)
        for pair in get_rolling_token_windows(tokens, first, longest, 1)
    ]
    totals = [0.0] * len(texts)
    for (number, _, _), value in zip(windows, _sums(model, [(a, b) for _, a, b in windows], batch), strict=True):
        totals[number] += value
    return [Likelihood(*each) for each in zip(texts, totals, map(len, encoded), strict=True)]


def longest_input(model: Any) -> int:
    """Return the maximum number of tokens of a model's input."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or DEFAULT_LENGTH)


def _prefix(tokenizer: Any) -> int:
    number = tokenizer.bos_token_id
    return int(tokenizer.eos_token_id if number is None else number)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    # A chat template already writes the BOS token.
    own = text.startswith(tokenizer.decode(_prefix(tokenizer)))
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False) if own else tokenizer.encode(text)
    return tokens


def _encoded(tokenizer: Any, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and continuation. Trailing white space of the prompt belongs to the continuation."""
    kept = prompt.rstrip()
    if not prompt:
        tokens = tokenizer.encode(continuation, add_special_tokens=False)
        first = _prefix(tokenizer)
        return ([first], tokens) if tokens[0] != first else (tokens[:1], tokens[1:])
    whole, before = _tokens(tokenizer, prompt + continuation), _tokens(tokenizer, kept)
    return before, whole[len(before) :]


def _sums(model: Any, pairs: Sequence[tuple[list[int], list[int]]], batch: int) -> list[float]:
    """Return the summed log-probability of the second tokens of each pair, after the first.

    Pairs that differ only in their last token, such as the letters of a choice, share a forward pass.
    """
    longest = longest_input(model)
    places: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, (before, tokens) in enumerate(pairs):
        taken = tuple((before + tokens)[-(longest + 1) :][:-1])
        places.setdefault((taken, len(tokens)), []).append(number)
    order = sorted(places, key=lambda key: (-len(key[0]), key))
    sums = [0.0] * len(pairs)
    with Progress("rate", len(order)) as bar:
        while order:
            width = len(order[0][0])
            # Rows less than half as long as the longest go to a batch with less padding.
            members = [key for key in order[:batch] if 2 * len(key[0]) >= width]
            order = order[len(members) :]
            ids = torch.zeros(len(members), width, dtype=torch.long)
            for row, (taken, _) in enumerate(members):
                ids[row, : len(taken)] = torch.tensor(taken)
            kept = max(width - len(taken) + count for taken, count in members)
            # No mask: padding comes after the tokens, and attention is faster without one.
            with torch.inference_mode():
                logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits
            for row, key in enumerate(members):
                taken, count = key
                end = len(taken) - (width - kept)
                chances = torch.log_softmax(logits[row, max(0, end - count) : end].float(), -1)
                for number in places[key]:
                    wanted = torch.tensor(pairs[number][1][-len(chances) :], device=chances.device)
                    sums[number] = float(chances.gather(1, wanted[:, None]).sum())
            bar.update(len(members))
    return sums
