"""The settings of the objectives: sections of `train` in the config.

In the formulas, c and r are the log-probabilities of the chosen and of the rejected answer, summed over their n+ and n-
tokens, C and R those under the reference, and s is the sigmoid.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zerolora.config.section import Fault, Section, Text
from zerolora.config.values import HUB_ADAPTERS, RUN_ADAPTER, is_fetched
from zerolora.errors import shown
from zerolora.registries import with_sections

MOST_TOKENS = 1 << 20
"""More than any vocabulary has."""
PositiveFloat = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class ObjectiveSection(Section):
    """The settings of one objective."""

    def faults(self) -> Iterator[Fault]:
        """Yield each combination of values that the objective does not allow."""
        yield from ()


class Sft(ObjectiveSection):
    """Supervised fine-tuning: the cross-entropy of the supervised tokens."""

    mean: Literal["token", "row"] = "token"
    """The mean over a global batch: token = of all its tokens; row = of the means of its rows, so that the tokens of a
    long row weigh less, as in tools that average a micro-batch of one row."""


START = "start"
"""The reference that is the model that training starts from."""


class WithReference(ObjectiveSection):
    """The settings of an objective that compares with a reference."""

    reference: Text = START
    """The model that training is compared with: start = the one that it starts from; the name of a run, or the
    directory of an adapter = that one, e.g. the first of several rounds."""


class Dpo(WithReference):
    """Direct preference optimization (arXiv 2305.18290), of D = (c - C) - (r - R)."""

    loss: Literal["sigmoid", "robust", "hinge", "length_normalized"] = "sigmoid"
    """Loss of a pair: sigmoid = -log s(beta D); robust = sigmoid for labels of which a share is wrong (arXiv
    2403.00409); hinge = max(0, 1 - beta D) (arXiv 2305.10425); length_normalized = sigmoid of
    (c - C) / n+ - (r - R) / n- (arXiv 2411.15124), which needs a beta of 2 or more."""
    beta: PositiveFloat = 0.1
    """Strength of the bond to the reference; a lower value allows larger changes."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """For robust: the share of pairs whose answers are exchanged."""
    sft_weight: Weight = 1.0
    """Weight of the cross-entropy of the chosen answers' tokens (arXiv 2404.19733). Without it, DPO may make both
    answers less likely, while its own loss and reward accuracy look perfect (docs/training.md)."""

    def faults(self) -> Iterator[Fault]:
        """Yield a label_smoothing without loss robust, the only one that uses it, or the reverse."""
        if self.loss == "robust" and not self.label_smoothing:
            text = "0.0 with loss robust, which needs the share of wrong labels; use a value between 0 and 0.5"
            yield ("label_smoothing",), f"{text}, e.g. 0.1, or loss: sigmoid"
        elif self.label_smoothing and self.loss != "robust":
            text = f"{self.label_smoothing} with loss {self.loss}, which has none; use 0.0, or loss: robust"
            yield ("label_smoothing",), text


class Ipo(WithReference):
    """IPO (arXiv 2310.12036): ((c - C) / n+ - (r - R) / n- - 1 / (2 beta))^2."""

    beta: PositiveFloat = 0.1
    """Regularization: the margin by which training moves the answers apart is 1 / (2 beta) for each token."""
    sft_weight: Weight = 0.0
    """Weight of the cross-entropy of the chosen answers' tokens."""


class Simpo(ObjectiveSection):
    """SimPO (arXiv 2405.14734), without a reference: -log s(beta (c / n+ - r / n-) - gamma)."""

    beta: PositiveFloat = 2.0
    """Scale of the mean log-probability of a token."""
    gamma: Weight = 0.5
    """Margin that the chosen answer's reward should have."""
    sft_weight: Weight = 0.0
    """Weight of the cross-entropy of the chosen answers' tokens."""


class Orpo(ObjectiveSection):
    """ORPO (arXiv 2403.07691), without a reference: the cross-entropy of the chosen answers' tokens less
    beta log s(log odds of the chosen - log odds of the rejected answer), with exp(c / n+) and exp(r / n-) as
    probabilities."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio."""
    prompt_loss: bool = False
    """Compute the cross-entropy over the prompts' tokens too, as TRL does."""


class Kto(WithReference):
    """KTO (arXiv 2402.01306), of answers that are each desirable or not: 1 - s(beta (d - z)) for a desirable and
    1 - s(beta (z - d)) for an undesirable answer, with d the change of its log-probability from the reference, and z
    the mean change of other rows' answers in the global batch, at least 0."""

    beta: PositiveFloat = 0.1
    """Strength of the bond to the reference; a lower value allows larger changes."""
    desirable_weight: Weight = 1.0
    """Weight of desirable answers. The paper recommends weights whose ratio makes up for unequal numbers of both."""
    undesirable_weight: Weight = 1.0
    """Weight of undesirable answers."""

    def faults(self) -> Iterator[Fault]:
        """Yield weights with which the loss is always 0."""
        if not (self.desirable_weight or self.undesirable_weight):
            text = "0.0, and so is undesirable_weight, so that the loss is 0; use more than 0.0 for one of them"
            yield ("desirable_weight",), text


class Distill(ObjectiveSection):
    """Distillation (arXiv 1503.02531): alpha times the cross-entropy of the labels plus (1 - alpha) T² times the
    Kullback-Leibler divergence of the model from a teacher, of the teacher's k most likely tokens and all others as
    one, both at the temperature T (docs/distillation.md)."""

    teacher: str | None = None
    """Name of the teacher, a model in fetch with the same vocabulary."""
    adapter: str | None = None
    """Adapter of the teacher: results/RUN/adapter of another run, or a fetched one."""
    top_k: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 64
    """Tokens of the teacher's distribution that are stored for each supervised token, in 6 bytes each."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions; another one computes the teacher's again."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of the cross-entropy of the labels; the divergence has the rest."""

    def faults(self) -> Iterator[Fault]:
        """Yield a missing teacher, or an adapter that is neither a run's nor fetched."""
        if self.teacher is None:
            yield ("teacher",), "is missing; name the teacher, a model in fetch"
        if self.adapter is not None and not (RUN_ADAPTER.fullmatch(self.adapter) or is_fetched(self.adapter)):
            text = f"{shown(self.adapter)} is no adapter of a run or of fetch.adapter"
            yield ("adapter",), f"{text}; use results/RUN/adapter or {HUB_ADAPTERS}/NAME"


@with_sections("objective_sections")
class ObjectiveSections(Section):
    """The settings of all objectives, each in the section of its name."""

    sft: Sft = Sft.model_construct()
    """Settings of sft."""
    dpo: Dpo = Dpo.model_construct()
    """Settings of dpo."""
    ipo: Ipo = Ipo.model_construct()
    """Settings of ipo."""
    simpo: Simpo = Simpo.model_construct()
    """Settings of simpo."""
    orpo: Orpo = Orpo.model_construct()
    """Settings of orpo."""
    kto: Kto = Kto.model_construct()
    """Settings of kto."""
    distill: Distill = Distill.model_construct()
    """Settings of distill."""
