"""Opens exported models to continue prompts greedily: with llama.cpp, transformers, peft or vLLM."""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.targets.target import Opened, RunResult
from zerolora.types import Device


def model_of(directory: Path, dtype: str = "float32", **options: Any) -> Any:
    """Return the model of a directory, loaded by transformers from safetensors, or from the GGUF file that the option
    `gguf_file` names."""
    from transformers import AutoModelForCausalLM

    from zerolora.model.architecture import auto_class, config_of

    safe = {} if "gguf_file" in options else {"use_safetensors": True}
    loader = AutoModelForCausalLM if "gguf_file" in options else auto_class(config_of(directory))
    loaded: Any = loader.from_pretrained(
        directory, dtype=dtype, local_files_only=True, trust_remote_code=False, **safe, **options
    )
    return loaded.eval()


def answering(model: Any, library: str, found: dict[str, Any] | None = None) -> Opened:
    """Return a loaded model as one that continues prompts greedily."""
    import torch

    def answer(prompt: list[int], tokens: int, stops: list[int]) -> list[int]:
        with torch.no_grad():
            ids = torch.tensor([prompt])
            written = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=stops or None,
                pad_token_id=stops[0] if stops else None,
            )
        continued: list[int] = written[0, len(prompt) :].tolist()
        return continued

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        return [answer(prompt, tokens, stops) for prompt in prompts]

    return Opened(library, answers, found or {})


def with_adapter(base: Path, adapter: Path) -> Any:
    """Return the base model with an adapter upon it, as peft computes with both."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model_of(base), str(adapter), torch_device="cpu").eval()


def quantized(source: RunResult, directory: Path, package: str) -> Opened:
    """Open a checkpoint whose weights `package` quantized: with vLLM where the config names one, else with transformers
    and that package, in the type of number that its config.json has."""
    if source.vllm_python is not None:
        return by_vllm(source.vllm_python, directory, source.data, device=source.device)
    library = f"transformers {version('transformers')} with {package} {version(package)}"
    return answering(model_of(directory, dtype="auto"), library)


def gguf(file: Path) -> Opened:
    """Open a GGUF file with llama.cpp, or, where that is not installed, with transformers' reader, which dequantizes
    it. Raises UserError if it cannot be opened."""
    if llama_cpp.is_installed():
        return llama_cpp.opened(file)
    # The reader raises errors of many types for what it does not know.
    try:
        model = model_of(file.parent, gguf_file=file.name)
    except Exception as error:
        raise UserError(f"{file}: transformers cannot open it: {str(error).splitlines()[0]:.200}") from None
    return answering(model, f"transformers {version('transformers')} (GGUF reader)")


def by_vllm(python: str, weights: Path, data: Path, adapter: Path | None = None, device: Device = "cpu") -> Opened:
    """Return the model of a directory, and an adapter upon it, as vLLM of the interpreter `python` answers with them
    on `device`.

    `data` is the prepared data that the run was trained on. Raises UserError if there is no vLLM, or if it cannot
    answer for this model; later, as soon as it is asked, if it fails.
    """
    from zerolora.config.settings import EvaluateSettings  # the config itself reads the registry of targets
    from zerolora.evaluate import vllm_engine
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.evaluate.kept import KeptAnswers

    # A model without an adapter is opened as a merged one, whose directory has its stop tokens.
    model = EvaluatedModel(weights, adapter or weights, None if adapter else weights, device)
    asking = EvaluateSettings(engine="vllm", vllm_python=python, check="exact")

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
        with tempfile.TemporaryDirectory() as folder:
            kept = KeptAnswers(Path(folder), "answers", len(rows))
            settings = asking.model_copy(update={"max_new_tokens": tokens, "batch": len(rows)})
            vllm_engine.answer_with_vllm(settings, data, model, rows, kept)
            result: list[Any] = [answer for answer, _ in kept.all()]  # vLLM writes tokens, never texts
            return result

    return Opened(vllm_engine.check(asking, data, model), answers, {})
