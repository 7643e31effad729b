"""The bytes of a base model's weights as they are loaded."""

from zerolora.config.method_sections import Quantization
from zerolora.methods.qlora import QloraMethod
from zerolora.model.spec import ModelSpec


def loaded_bytes(model: ModelSpec, width: int, quantization: Quantization | None) -> float:
    """Return the bytes of a base model's weights on one device, of `width` bytes each, or quantized."""
    if quantization is None:
        return model.parameters * width
    method = QloraMethod(quantization=quantization.type, double_quantization=quantization.double)
    return method.frozen_bytes(model, width)
