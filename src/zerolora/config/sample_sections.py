"""What is sampled from a model: sections of `samples` in the config."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from zerolora.config.section import Fault, Positive, Section, Text
from zerolora.config.values import Endpoint, Name, Seed


class Served(Section):
    """A model that a server answers for."""

    address: Endpoint
    """URL of an OpenAI-compatible endpoint, e.g. https://models.example/v1; http only for this machine."""
    model: Text
    """Name of the model at the endpoint."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with the API key. Default: send no key."""


class SampledModel(Section):
    """The model that answers: exactly one of the keys."""

    run: Name | None = None
    """A run, with its merged weights, or with its adapter if it is not merged."""
    base: Literal[True] | None = None
    """The base model of the data set, as it was fetched."""
    served: Served | None = None
    """A model at an OpenAI-compatible endpoint."""

    @model_validator(mode="after")
    def _is_one(self) -> "SampledModel":
        if len(given := [name for name, value in self if value is not None]) != 1:
            has = " and ".join(given) if given else "none of its keys"
            raise ValueError(f"has {has}; give one of run: NAME, base: true, or served: {{address: URL, model: NAME}}")
        return self


class SampleSection(Section):
    """One set of sampled answers, as far as the stage sample reads it."""

    of: SampledModel
    """The model that answers, e.g. {run: default}, {base: true}."""
    n: Positive = 4
    """Answers to each prompt. A larger number later adds answers to those that there are."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Divisor of the logits; 0 = always the most likely token, with n: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw only from the fewest tokens whose probabilities sum to this value or more."""
    seed: Seed = 42
    """Seed of the draws."""
    max_new_tokens: Positive = 128
    """Maximum length of an answer in tokens."""
    stop: list[Text] = []
    """Texts that end an answer, which is cut at the first of them, e.g. ["\\n\\n"]."""
    batch: Positive | Literal["auto"] = "auto"
    """Number of prompts per batch, or of requests at a time to a served model; auto = 64, or fewer if they do not fit
    into free memory; 8 requests."""
    ranks: Positive = 1
    """Number of processes that share the answers; on CUDA, each has its own GPUs."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that generates answers."""
    vllm_python: Text | None = None
    """Python interpreter of the environment with vLLM. Default: the one that runs zerolora."""


class Sample(SampleSection):
    """One set of sampled answers: n answers of a model to each prompt of a data set's training rows."""

    dataset: Name | None = None
    """Data set whose prompts are asked, a name in `prepare`. Default: that of the run."""

    def faults(self) -> Iterator[Fault]:
        """Yield keys that exclude each other."""
        if self.temperature == 0 and self.n > 1:
            yield (
                ("n",),
                f"{self.n} with temperature 0, whose answers are all the same; use 1, or a temperature above 0",
            )
        if self.of.run is None and self.dataset is None:
            yield ("dataset",), "is not set, and only a run has one by default; name a data set of prepare"
        if self.engine != "vllm" and self.vllm_python is not None:
            yield ("vllm_python",), "is used only with engine: vllm; set engine: vllm, or remove it"
        if self.engine == "vllm" and self.ranks > 1:
            yield ("ranks",), f"{self.ranks} with engine: vllm, which processes all prompts at once; use 1"
        if self.of.served:
            for key in ("engine", "ranks"):
                if (value := getattr(self, key)) != SampleSection.model_fields[key].default:
                    yield (key,), f"{value} with a served model, which its server runs; remove it"
