"""Greedy generation by settings of our own, whatever the model's files say.

transformers fills every setting that a call leaves open from the model's generation_config.json, or from config.json: a
penalty, a minimum length, a text that stops, no cache. Answers that are compared must depend on none of them, and vLLM
ignores them too (evaluate/vllm_engine.py).
"""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from zerolora.model import foreign

READ = ("eos_token_id", "pad_token_id")
"""What prompts and answers take from generation_config.json (prompt_format.py)."""
NO_SETTINGS = ("_from_model_config", "transformers_version", "bos_token_id")
"""Keys of the file that change no answer: every prompt is given with its first token."""


def greedy(limit: int, stops: Collection[int], padding: int | None) -> Any:
    """Return the settings of an answer of at most `limit` tokens that ends at any of `stops`."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=sorted(stops) or None,
        pad_token_id=padding,
    )


@contextlib.contextmanager
def own_settings(model: Any, settings: Any) -> Iterator[None]:
    """Let `model.generate` find these settings alone: it takes what they leave open from the model's."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = inner.generation_config
    inner.generation_config = settings
    try:
        yield
    finally:
        inner.generation_config = before


def stops_alone(model: Any) -> Any:
    """Return settings that say when a model's answers end, and nothing else."""
    from transformers import GenerationConfig

    return GenerationConfig(**{name: getattr(model.generation_config, name) for name in READ})


def unused(directory: Path) -> list[str]:
    """Return `file: keys` of what a model's files set for its answers and nothing here uses."""
    ours = greedy(1, (), None).to_dict()
    read = {
        foreign.GENERATION: foreign.generation_config(directory),
        # Where transformers looks without that file.
        foreign.CONFIG: {key: value for key, value in foreign.model_config(directory).items() if key in ours},
    }
    found = {name: sorted(key for key in values if _differs(key, values[key], ours)) for name, values in read.items()}
    return [f"{name}: {', '.join(keys)}" for name, keys in found.items() if keys]


def _differs(key: str, value: Any, ours: dict[str, Any]) -> bool:
    return key not in (*READ, *NO_SETTINGS) and (value or None) != (ours.get(key) or None)
