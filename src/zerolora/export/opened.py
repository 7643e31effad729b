"""Opens exported models: with transformers or peft, to continue prompts greedily."""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.export.targets.base import Opened


def model_of(directory: Path, **options: Any) -> Any:
    """Return the model of a directory in fp32, loaded by transformers from safetensors, or from the GGUF file that the
    option `gguf_file` names."""
    import torch
    from transformers import AutoModelForCausalLM

    from zerolora.architecture import auto_class, config_of

    safe = {} if "gguf_file" in options else {"use_safetensors": True}
    loader = AutoModelForCausalLM if "gguf_file" in options else auto_class(config_of(directory))
    loaded: Any = loader.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **safe, **options
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

    return Opened(library, answer, found or {})


def gguf(file: Path) -> Opened:
    """Open a GGUF file with transformers' reader, which dequantizes it. Raises UserError if it cannot."""
    import transformers

    # The reader raises errors of many types for what it does not know.
    try:
        model = model_of(file.parent, gguf_file=file.name)
    except Exception as error:
        raise UserError(f"{file}: transformers cannot open it: {str(error).splitlines()[0]:.200}") from None
    return answering(model, f"transformers {transformers.__version__} (GGUF reader)")
