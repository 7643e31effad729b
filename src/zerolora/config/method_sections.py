"""The settings of the methods that training can run: sections of `train` in the config."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from zerolora.config.section import Positive, Section, Text


def _expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is no regular expression ({error}); escape its special characters with \\") from None
    return value


Expression = Annotated[str, Field(min_length=1), AfterValidator(_expression)]
DEFAULT_INIT = "default"
"""A as nn.Linear starts, B zero: nothing is taken out of the base."""
INIT_PATTERN = r"^(default|pissa|pissa_niter_[1-9][0-9]?|olora)$"
"""As peft names them; pissa_niter_N estimates the singular vectors in N iterations."""


class Lora(Section):
    """The adapter of lora, dora, qlora and qdora (LoRA, arXiv 2106.09685)."""

    r: Positive = 8
    """Rank of the two factors."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The update is scaled by alpha / r."""
    init: Annotated[str, Field(pattern=INIT_PATTERN)] = DEFAULT_INIT
    """What the factors start with: default (the first random, the second zero), pissa (the largest singular values of
    the base weight, arXiv 2404.02948), pissa_niter_16 (the same, estimated in 16 iterations), or olora (its QR
    decomposition, arXiv 2406.01775). What is published then has twice the rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(r) instead, so that a large r still learns (rsLoRA, arXiv 2312.03732)."""
    plus_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Ratio of the second factor's learning rate to the first's (LoRA+, arXiv 2402.12354, which advises 16)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the first factor."""
    targets: Expression | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Modules to adapt: all-linear (all linear ones but the output head), a list of names, as in q_proj, or a regular
    expression that matches whole paths, as in model.layers.[0-3].*q_proj."""
    rank_pattern: dict[Expression, Positive] = {}
    """Another rank for some modules, by name, end of the path or regular expression, as in {q_proj: 16}."""
    alpha_pattern: dict[Expression, Annotated[float, Field(gt=0)]] = {}
    """Another alpha for some modules, likewise."""
    modules_to_save: list[Text] = []
    """Modules of which a whole copy is trained and saved, by the end of the path, as in [lm_head]; norm means
    input_layernorm too."""


class Ia3(Section):
    """The adapter of ia3 (arXiv 2205.05638): a vector for each module, which scales its output, or the input of the
    MLP's last."""

    targets: Literal["auto"] | Annotated[list[Text], Field(min_length=1)] = "auto"
    """Modules to adapt: auto (keys, values and the MLP's last, as in the paper), or a list of names."""
    modules_to_save: list[Text] = []
    """Modules of which a whole copy is trained and saved, by the end of the path."""


class Vera(Section):
    """The adapter of vera (arXiv 2310.11454): two vectors a module, around two random matrices that all share."""

    r: Positive = 256
    """Rank of the shared matrices; far higher than LoRA's, since only r and the outputs of a module are trained."""
    d_initial: Annotated[float, Field(gt=0)] = 0.1
    """What the vector between the matrices starts with; the other one starts with 0."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the first matrix."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Modules to adapt: all-linear (all linear ones but the output head), or a list of names, as in q_proj."""
    projection_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random matrices; they are saved with the adapter."""
    modules_to_save: list[Text] = []
    """Modules of which a whole copy is trained and saved, by the end of the path."""


class Quantization(Section):
    """The base model of qlora and qdora in fewer bits (bitsandbytes): its linear modules, but the output head."""

    type: Literal["nf4", "fp4", "int8"] = "nf4"
    """Type of a weight: nf4 (QLoRA, arXiv 2305.14314), fp4, or int8 (LLM.int8, arXiv 2208.07339)."""
    double: bool = True
    """Quantize the constants of the 4-bit types too."""
    storage: Literal["auto", "uint8", "fp32", "fp16", "bf16"] = "auto"
    """Type that tensors of 4-bit weights are declared as; auto = the one that the strategy can shard: the model's own
    with fsdp and zero3, otherwise uint8."""


class MethodSections(Section):
    """The settings of all methods."""

    lora: Lora = Lora()
    """The adapter of lora, dora, qlora and qdora."""
    ia3: Ia3 = Ia3()
    """The adapter of ia3."""
    vera: Vera = Vera()
    """The adapter of vera."""
    quantization: Quantization = Quantization()
    """The base model of qlora and qdora."""
