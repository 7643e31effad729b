"""Open exported models with llama.cpp, transformers, peft or vLLM, to continue prompts greedily."""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.targets.target import Opened, RunResult
from zerolora.model.greedy import greedy, own_settings
from zerolora.types import Device


def model_of(directory: Path, dtype: str = "float32", **options: Any) -> Any:
    """Load the model of a directory with transformers, from safetensors or from the GGUF file of option `gguf_file`."""
    if "gguf_file" in options:
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        return loader.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False, **options
        ).eval()
    from zerolora.model.load_model import load_model

    return load_model(directory, dtype=dtype).eval()


def answering(model: Any, library: str) -> Opened:
    """Wrap a loaded model, which then continues prompts greedily."""
    import torch

    def answer(prompt: list[int], tokens: int, stops: list[int]) -> list[int]:
        settings = greedy(tokens, stops, stops[0] if stops else None)
        ids = torch.tensor([prompt])
        with torch.no_grad(), own_settings(model, settings):
            written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        continued: list[int] = written[0, len(prompt) :].tolist()
        return continued

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        return [answer(prompt, tokens, stops) for prompt in prompts]

    return Opened(library, answers, {})


def with_adapter(base: Path, adapter: Path) -> Any:
    """Load the base model with an adapter, as peft does."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model_of(base), str(adapter), torch_device="cpu").eval()


def quantized(source: RunResult, directory: Path, package: str) -> Opened:
    """Open a checkpoint that `package` quantized: with vLLM if configured, else with transformers and that package, in
    the dtype of its config.json."""
    if source.vllm_python is not None:
        return by_vllm(source.vllm_python, directory, source.data, device=source.device)
    library = f"transformers {version('transformers')} with {package} {version(package)}"
    return answering(model_of(directory, dtype="auto"), library)


def gguf(file: Path) -> Opened:
    """Open a GGUF file with llama.cpp or, if that is not installed, with transformers' reader, which dequantizes it.

    Raises UserError if it cannot be opened.
    """
    if llama_cpp.is_installed():
        return llama_cpp.opened(file)
    try:
        model = model_of(file.parent, gguf_file=file.name)
    except Exception as error:  # the reader raises many types
        raise UserError(f"{file}: transformers cannot open it: {str(error).splitlines()[0]:.200}") from None
    return answering(model, f"transformers {version('transformers')} (GGUF reader)")


def by_vllm(python: str, weights: Path, data: Path, adapter: Path | None = None, device: Device = "cpu") -> Opened:
    """Open the model of a directory, with an adapter if given, with the vLLM of the interpreter `python` on `device`.

    `data` is the run's prepared data. Raises UserError if there is no vLLM or it does not support the model; a call for
    answers raises it if vLLM fails.
    """
    from zerolora.config.settings import EvaluateSettings  # the config itself reads the registry of targets
    from zerolora.evaluate import vllm_engine
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.evaluate.kept import KeptAnswers

    # Without an adapter it is opened as a merged model, whose directory has its stop tokens.
    model = EvaluatedModel(weights, adapter or weights, None if adapter else weights, device)
    base_settings = EvaluateSettings(engine="vllm", vllm_python=python, check="exact")

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
        with tempfile.TemporaryDirectory() as folder:
            kept = KeptAnswers(Path(folder), "answers", len(rows))
            settings = base_settings.model_copy(update={"max_new_tokens": tokens, "batch": len(rows)})
            vllm_engine.answer_with_vllm(settings, data, model, rows, kept)
            result: list[Any] = [each.answer for each in kept.all()]  # vLLM writes tokens, never texts
            return result

    return Opened(vllm_engine.check(base_settings, data, model), answers, {})
