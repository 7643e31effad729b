"""The formats of quantized checkpoints that are dequantized, by the quant_method of their config.json."""

from collections.abc import Callable, Mapping

from zerolora.model.quantized import fp8, gptq, llm_compressor, mxfp4
from zerolora.model.quantized.checkpoint import Checkpoint

FORMATS: Mapping[str, Callable[[Checkpoint], None]] = {
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "mxfp4": mxfp4.read,
    "compressed-tensors": llm_compressor.read,
    "gptq": gptq.read,
    "awq": gptq.read_awq,
}
