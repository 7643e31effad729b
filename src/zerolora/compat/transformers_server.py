"""transformers' server: bounds on its requests, its prompts and its answers."""

from collections.abc import Callable
from typing import Any

from zerolora.compat.versions import patch


@patch(
    "transformers",
    upstream="none known; the server tokenizes on its event loop, and generates beyond the model's context",
    features=(
        "transformers.cli.serving.server:build_server",
        "transformers.cli.serving.utils:GenerateManager.generate_streaming",
        "transformers.cli.serving.utils:GenerateManager.generate_non_streaming",
    ),
)
def add_bounds(around: Callable[[Any], Any], context: int) -> None:
    """Put `around` around the server's ASGI application, answer 400 to a prompt that leaves no room in a context of
    that many tokens, and end an answer where the context does."""
    from transformers.cli.serving import server
    from transformers.cli.serving.utils import GenerateManager

    build = server.build_server
    server.build_server = lambda *arguments, **options: around(build(*arguments, **options))
    for name in ("generate_streaming", "generate_non_streaming"):
        setattr(GenerateManager, name, _within(getattr(GenerateManager, name), context))


def _within(generate: Callable[..., Any], context: int) -> Callable[..., Any]:
    """Return a method of GenerateManager that keeps prompt and answer within the context."""

    def bounded(self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *others: Any, **named: Any) -> Any:
        from fastapi import HTTPException

        room = context - inputs["input_ids"].shape[-1]
        if room < 1:
            detail = f"the prompt has {context - room:,} tokens; the model takes {context:,} with its answer"
            raise HTTPException(400, f"{detail}: send a shorter prompt")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)
        return generate(self, model, processor, inputs, gen_config, *others, **named)

    return bounded
