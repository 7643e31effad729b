"""Opens what was exported with vLLM, in the Python environment that has it, as the evaluation does."""

import tempfile
from pathlib import Path
from typing import Any

from zerolora.export.targets.target import Opened
from zerolora.types import Device


def opened_by_vllm(
    python: str, weights: Path, data: Path, adapter: Path | None = None, device: Device = "cpu"
) -> Opened:
    """Return the model of a directory, and an adapter upon it, as vLLM of the interpreter `python` answers with them
    on `device`.

    `data` is the prepared data that the run was trained on. Raises UserError if there is no vLLM, or if it cannot
    answer for this model; later, as soon as it is asked, if it fails.
    """
    from zerolora.config.settings import EvaluateSettings  # the config itself reads the registry of targets
    from zerolora.evaluate import vllm_engine
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.evaluate.kept import KeptAnswers

    # A model without an adapter is asked as a merged one, whose directory has its stop tokens.
    model = EvaluatedModel(weights, adapter or weights, None if adapter else weights, device)
    asking = EvaluateSettings(engine="vllm", vllm_python=python, check="exact")

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
        with tempfile.TemporaryDirectory() as folder:
            kept = KeptAnswers(Path(folder), "answers", len(rows))
            settings = asking.model_copy(update={"max_new_tokens": tokens, "batch": len(rows)})
            vllm_engine.answer_with_vllm(settings, data, model, rows, kept)
            found: list[Any] = [answer for answer, _ in kept.all()]  # vLLM writes tokens, never texts
            return found

    return Opened(vllm_engine.check(asking, data, model), answers, {})
