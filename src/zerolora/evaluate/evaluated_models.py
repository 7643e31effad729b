"""Loads the model to evaluate: a base model, a base model with an adapter, or a merged model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerolora.compat.bitsandbytes_patches import keep_layout
from zerolora.files import MANIFEST
from zerolora.machine import devices
from zerolora.machine.devices import on_gpu
from zerolora.methods.method import WHOLE_WEIGHTS
from zerolora.methods.peft_format import CONFIG
from zerolora.methods.quantized_base import load_library
from zerolora.methods.registry import check_published
from zerolora.model import added_tokens, foreign, prompt_format
from zerolora.model.added_tokens import AddedToken
from zerolora.model.architecture import config_of, tokenizer_of
from zerolora.model.dequantized import weight_headers
from zerolora.model.load_model import load_model
from zerolora.model.rope import EVER
from zerolora.model.stored_quantization import stored_quantization
from zerolora.train.rope_by_row import compute_by_row
from zerolora.types import Device

SHARE = 0.8
"""Share of a GPU's free memory for a model; a larger model is spread over all GPUs of the process, and the host."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate."""

    base: Path
    """Directory of the base weights."""
    adapter: Path | None = None
    """Directory of the adapter trained on them; None for the base model itself."""
    merged: Path | None = None
    """Directory of the merged weights, if any."""
    device: Device = "cpu"

    @property
    def directory(self) -> Path:
        """The directory with the model's stop tokens and padding token."""
        return self.merged or self.adapter or self.base

    @property
    def torch_device(self) -> torch.device:
        """The first GPU of this process, or the CPU."""
        return torch.device(devices.GPU, 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def loaded_adapter(self) -> Path | None:
        """The adapter to load beside the weights, unless it was merged."""
        return None if self.merged else self.adapter


def load(
    weights: Path, device: torch.device, tokens: list[AddedToken], adapter: Path | None = None, beside: float = 0
) -> tuple[Any, Any]:
    """Load model and tokenizer of a model directory, and an adapter trained on it.

    A base model gets the `tokens` that its data adds, with the embeddings that training starts with. A model that does
    not fit on one GPU, with `beside` bytes next to its weights, is spread over all GPUs of this process. Raises
    UserError if the adapter is incomplete, or of another model.
    """
    if adapter is not None:
        check_published(adapter, weights)
    tokenizer, lacking = load_tokenizer(weights, tokens, adapter)
    placed = placement(weights, device, beside)
    stored = stored_quantization(weights)
    if stored:
        load_library()
        config = config_of(weights)
        # Its own config says how the run that made it computed.
        dtype = "float32" if device.type == "cpu" else str(config.dtype).removeprefix("torch.")
        config.quantization_config["bnb_4bit_compute_dtype"] = dtype
        placed = {"config": config, **placed}
    # On a CPU, fp32 is both faster and exact; on a GPU, the weights keep their dtype.
    model = load_model(weights, dtype="auto" if on_gpu(device) else torch.float32, **placed)
    if stored:
        keep_layout(model)
    added_tokens.add_rows(model, lacking)
    if adapter is not None:
        model = with_adapter(model, adapter)
    compute_by_row(model, EVER)
    return (model.eval() if "device_map" in placed else model.eval().to(device=device)), tokenizer


def load_tokenizer(weights: Path, tokens: list[AddedToken], adapter: Path | None) -> tuple[Any, list[AddedToken]]:
    """Return the tokenizer of a model directory, or of an adapter that has its own, with `tokens` added, and those of
    `tokens` that were missing."""
    own = adapter is not None and (adapter / foreign.TOKENIZER).is_file()
    directory = adapter if adapter is not None and own else weights
    tokenizer = tokenizer_of(directory)
    known = {} if own else tokenizer.get_vocab()
    lacking = [each for each in tokens if each.token not in known]
    added_tokens.extend_again(tokenizer, tokens)
    return tokenizer, lacking


def stops_of(model: EvaluatedModel, loaded: Any, tokenizer: Any, data: Path) -> set[int]:
    """Return the stop tokens of a model and set the tokenizer's padding token.

    A fine-tuned model's are in its own directory, as for any user of it. The base model stops at the data's stop tokens
    too, so that the comparison is fair.
    """
    if model.adapter is not None:
        stops = prompt_format.stop_tokens(model.directory, loaded)
        tokenizer.pad_token_id = prompt_format.padding(model.directory, tokenizer, stops)
        return stops
    prepared = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "stop_tokens", "pad_token")
    tokenizer.pad_token = prepared["pad_token"]
    return {*tokenizer.convert_tokens_to_ids(prepared["stop_tokens"]), tokenizer.eos_token_id} - {None}


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return a base model with the trained adapter in peft's form, or with all its weights replaced."""
    if not (adapter / CONFIG).is_file() and (adapter / WHOLE_WEIGHTS).is_file():
        from safetensors.torch import load_file

        model.load_state_dict(load_file(adapter / WHOLE_WEIGHTS), strict=False)
        return model
    from peft import PeftModel

    # The transformers model itself, with peft's layers in it. By default, peft loads an adapter to a GPU if there is
    # one.
    return PeftModel.from_pretrained(model, str(adapter), torch_device="cpu").get_base_model()


def placement(weights: Path, device: torch.device, beside: float = 0, loaded: float | None = None) -> dict[str, Any]:
    """Return the arguments for transformers and accelerate to spread a model that does not fit on one GPU over all
    GPUs, and host memory for the rest; empty if it fits. `loaded`: bytes of the weights on the GPU, by default those of
    their files."""
    if not on_gpu(device):
        return {}
    size = sum(file.nbytes for file in weight_headers(weights)) if loaded is None else loaded
    return {"device_map": "auto"} if size + beside > SHARE * torch.cuda.mem_get_info(device)[0] else {}
