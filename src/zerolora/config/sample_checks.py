"""Checks of `samples` and `selections` against the other sections of the config."""

from collections.abc import Iterable

from zerolora.config.resolve import models_by_source, models_on_load
from zerolora.config.schema import Config
from zerolora.config.section import Fault
from zerolora.errors import shown

ADDED = ("add_special_tokens", "add_tokens")


def impossible_samples(config: Config) -> Iterable[Fault]:
    """Yield samples of an unknown run, of prompts that are unknown or of another model's format, and settings that
    vLLM does not support; and selections from unknown samples."""
    for name, sample in config.samples.items():
        here = ("samples", name)
        for key, text in sample.faults():
            yield (*here, *key), text
        run = sample.of.run
        if run is not None and run not in config.all_runs:
            listed = ", ".join(list(config.all_runs)[:10]) or "none: add it to runs"
            yield (*here, "of", "run"), f"{shown(run)} is not a run; use one of {listed}"
            continue
        dataset = config.prompts_of(name)
        if sample.dataset is not None and dataset not in config.prepare:
            listed = ", ".join(config.prepare)
            yield (*here, "dataset"), f"{shown(dataset)} is not a data set of prepare; use one of {listed}"
        elif dataset in config.prepare:
            yield from _of_other_model(config, name, dataset)
            yield from _without_vllm(config, name, dataset)
    for name, selection in config.selections.items():
        if selection.samples not in config.samples:
            listed = ", ".join(config.samples) or "none: add it there"
            text = f"{shown(selection.samples)} is not in samples; use one of {listed}"
            yield ("selections", name, "samples"), text


def _of_other_model(config: Config, name: str, dataset: str) -> Iterable[Fault]:
    """Yield prompts in the tokens of another model than the run's."""
    run = config.samples[name].of.run
    if run is None or (theirs := config.all_runs[run].dataset) not in config.prepare or theirs == dataset:
        return
    ours, others = config.prepare[dataset], config.prepare[theirs]
    models = {name: model for _, models in models_by_source(config) for name, model in models.items()}
    here = ("samples", name, "dataset")
    if ours.model != others.model and models.get(ours.model) != models.get(others.model):
        text = f"{dataset}, whose prompts are in tokens of {ours.model}, and {run} has base model {others.model}"
        yield here, f"{text}; use a data set of {others.model}"
    for key in ADDED:
        if getattr(ours, key) != getattr(others, key):
            text = f"{dataset}, whose {key} is {shown(getattr(ours, key))}, and that of {theirs}, the data set of {run}"
            yield here, f"{text}, is {shown(getattr(others, key))}; use a data set with the same"


def _without_vllm(config: Config, name: str, dataset: str) -> Iterable[Fault]:
    """Yield settings that vLLM does not support; evaluate/vllm_engine.py checks what the config does not show."""
    sample, data = config.samples[name], config.prepare[dataset]
    if sample.engine != "vllm" or sample.of.served:
        return
    here = ("samples", name, "engine")
    if key := next((key for key in ADDED if getattr(data, key)), None):
        text = f"vllm with {dataset}, which has {key}, and vLLM reads the base model unchanged; use transformers"
        yield here, text
    if data.model in models_on_load(config).values():
        text = f"vllm with {data.model}, which has dequantize: on_load, and vLLM reads its files undequantized"
        yield here, f"{text}; use transformers"
