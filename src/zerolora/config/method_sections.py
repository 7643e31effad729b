"""The settings of the training methods: sections of `train` in the config."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from zerolora.config.section import Positive, Section, Text
from zerolora.registries import with_sections


def _expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"is not a valid regular expression ({error}); escape its special characters with \\"
        ) from None
    return value


Expression = Annotated[str, Field(min_length=1), AfterValidator(_expression)]
DEFAULT_INIT = "default"
"""Initialize A as nn.Linear does and B to zero; the base weights are unchanged."""
INIT_PATTERN = r"^(default|pissa|pissa_niter_[1-9][0-9]?|olora)$"
"""peft's names; pissa_niter_N estimates the singular vectors in N iterations."""


class Lora(Section):
    """The adapter of lora, dora, qlora and qdora (LoRA, arXiv 2106.09685)."""

    r: Positive = 8
    """Rank of the two factors A and B."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scaling: the update B·A is multiplied by alpha / r."""
    init: Annotated[str, Field(pattern=INIT_PATTERN)] = DEFAULT_INIT
    """Initialization of the factors: default (A random, B zero), pissa (largest singular values of the base weight,
    arXiv 2404.02948), pissa_niter_16 (the same, estimated in 16 iterations), or olora (QR decomposition of the base
    weight, arXiv 2406.01775). With any but default, the saved adapter has twice the rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(r) instead, so that large ranks train well (rsLoRA, arXiv 2312.03732)."""
    plus_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Learning rate of B relative to that of A (LoRA+, arXiv 2402.12354, which recommends 16)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the input of A."""
    targets: Expression | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Modules to adapt: all-linear (all linear modules except the output head, and all experts), a list of names, e.g.
    [q_proj, v_proj], or a regular expression for whole paths, e.g. model.layers.[0-3].*q_proj."""
    rank_pattern: dict[Expression, Positive] = {}
    """Different ranks for some modules, by name, end of the path or regular expression, e.g. {q_proj: 16}."""
    alpha_pattern: dict[Expression, Annotated[float, Field(gt=0)]] = {}
    """Different alphas for some modules, in the same form."""
    modules_to_save: list[Text] = []
    """Modules to train and save in full, by the end of the path, e.g. [lm_head]; norm also matches
    input_layernorm."""


class Ia3(Section):
    """The adapter of ia3 (arXiv 2205.05638): a vector per module that scales its output, or for the last module of an
    MLP its input."""

    targets: Literal["auto"] | Annotated[list[Text], Field(min_length=1)] = "auto"
    """Modules to adapt: auto (keys, values and the last module of each MLP, as in the paper), or a list of names."""
    modules_to_save: list[Text] = []
    """Modules to train and save in full, by the end of the path."""


class Vera(Section):
    """The adapter of vera (arXiv 2310.11454): two vectors per module, and two random matrices shared by all modules."""

    r: Positive = 256
    """Rank of the shared matrices. Far higher than for LoRA, since a module trains only r + output-size numbers."""
    d_initial: Annotated[float, Field(gt=0)] = 0.1
    """Initial value of the vector between the matrices; the other vector starts at 0."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the input of the first matrix."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Modules to adapt: all-linear (all linear modules except the output head), or a list of names, e.g. [q_proj]."""
    projection_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random matrices, which are saved with the adapter."""
    modules_to_save: list[Text] = []
    """Modules to train and save in full, by the end of the path."""


class Quantization(Section):
    """Quantization of the base model for qlora and qdora (bitsandbytes): linear modules except the output head."""

    type: Literal["nf4", "fp4", "int8"] = "nf4"
    """Data type: nf4 (QLoRA, arXiv 2305.14314), fp4, or int8 (LLM.int8(), arXiv 2208.07339)."""
    double: bool = True
    """Also quantize the scaling constants of the 4-bit types."""
    storage: Literal["auto", "uint8", "fp32", "fp16", "bf16"] = "auto"
    """Storage type of 4-bit weights; auto = one that the strategy can shard: the model's own with fsdp and zero3,
    uint8 otherwise."""


@with_sections("method_sections")
class MethodSections(Section):
    """The settings of all training methods."""

    lora: Lora = Lora.model_construct()
    """The adapter of lora, dora, qlora and qdora."""
    ia3: Ia3 = Ia3()
    """The adapter of ia3."""
    vera: Vera = Vera.model_construct()
    """The adapter of vera."""
    quantization: Quantization = Quantization.model_construct()
    """Quantization of the base model for qlora and qdora."""
