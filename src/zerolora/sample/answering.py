"""Draws the answers of some batches with a loaded model."""

from collections.abc import Callable, Sequence
from typing import Any

from zerolora.config.settings import SampleSettings
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.generation import SharedPrefix, answer_batch, cache_of_prompts, shared_prefix
from zerolora.model.answer_text import AnswerTexts
from zerolora.model.rope import first_grown
from zerolora.progress import Progress
from zerolora.sample.draws import Drawn
from zerolora.sample.kept_samples import Sampled, line_of
from zerolora.sample.prompt_batches import AskedPrompt, Batch

Keep = Callable[[list[list[Any]]], None]


def draw_answers(
    model: tuple[Any, Any, set[int]],
    settings: SampleSettings,
    prompts: Sequence[AskedPrompt],
    batches: Sequence[Batch],
    room: PromptBatches,
    keep: Keep,
    done: int = 0,
    silent: bool = False,
) -> int:
    """Draw the answers of batches, and call `keep` with the lines of those computed together; return the number of
    tokens.

    model: the loaded model, its tokenizer and its stop tokens. room: a batch that does not fit into memory is divided.
    done: answers that were there before, for the bar; `silent` shows none.
    """
    loaded, tokenizer, stops = model
    texts = AnswerTexts(tokenizer, stops, settings.stop)
    drawn = Drawn(settings.seed, settings.temperature, settings.top_p)
    generated = 0
    total = done + sum(len(batch.prompts) for batch in batches)

    # Of all prompts, not of those that are left. One whose rotary factors change with its length is by itself.
    lengths = sorted(len(prompt.tokens) for prompt in prompts)
    longest = [length + settings.max_new_tokens for length in lengths]
    short = (lengths[: first_grown(loaded, longest)] or [0])[-1]
    prefix = shared_prefix(loaded, [prompt.tokens for prompt in prompts if len(prompt.tokens) <= short])
    cached: tuple[list[int], Callable[[], Any]] | None = None
    with Progress("answer", total, done, silent=silent) as bar:
        for batch in batches:
            for members in _parts(batch.prompts, prompts, short, room):
                tokens = [prompts[number].tokens for number in members]
                own = prefix if len(tokens[0]) <= short else SharedPrefix()
                if cached is None or cached[0] != members:
                    cached = None  # free its memory first
                    padding = tokenizer.pad_token_id
                    cached = members, cache_of_prompts(loaded, padding, tokens, settings.max_new_tokens, own)
                keys = [(prompts[number].key, batch.sample) for number in members]
                continued = answer_batch(
                    loaded,
                    tokenizer.pad_token_id,
                    tokens,
                    stops,
                    settings.max_new_tokens,
                    own,
                    texts.ended if settings.stop else None,
                    draw=drawn.of(keys) if settings.temperature else None,
                    cache=cached[1](),
                )
                lines = []
                for (key, sample), answer in zip(keys, continued, strict=True):
                    lines.append(line_of(key, sample, Sampled(*texts.of(answer))))
                    generated += len(answer)
                keep(lines)
                bar.update(len(members), f"{bar.rate(len(members)):.1f} answers/s")
    return generated


def _parts(members: list[int], prompts: Sequence[AskedPrompt], short: int, room: PromptBatches) -> list[list[int]]:
    """Return the parts of a batch that are computed one after the other: prompts with rotary factors of their own by
    themselves, others as far as memory has room."""
    long = [[number] for number in members if len(prompts[number].tokens) > short]
    rest = members[len(long) :]
    size = room.rows(len(prompts[rest[0]].tokens), len(rest)) if rest else 1
    return long + [rest[start : start + size] for start in range(0, len(rest), size)]
