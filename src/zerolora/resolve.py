"""From the config to the settings of every stage: defaults filled in, a run's overrides merged, numbers normalised.

    zerolora resolve --config config/config.yaml --output results/config.json

Both engines compare these settings, never the file's text, so a comment, the order of keys or `2e-4` against `0.0002`
is no change.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerolora.config import OWN_JSON, Config, Fetch, Hardware, RunSettings
from zerolora.files import read_json
from zerolora.units import parse_bytes


def resolve(config: Config) -> dict[str, Any]:
    """Return the settings of every stage: `{"fetch": {model: …}, "fetch_data": {data: …}, "prepare": {data set: …},
    "evaluate": {data set: …}, "runs": {run: {stage: …}}}`.

    A stage finds here exactly what it reads, so a key that it does not read cannot make it run again.
    """
    return {
        "fetch": {
            name: {"source": source, **model.model_dump()}
            for source, models in models_by_source(config)
            for name, model in models.items()
        },
        "fetch_data": {name: data.model_dump() for name, data in config.fetch.data.items()},
        "prepare": {name: data.model_dump(exclude={"check"}) for name, data in config.prepare.items()},
        "evaluate": {
            name: {**config.evaluate.model_dump(), "check": data.check} for name, data in config.prepare.items()
        },
        "runs": {
            name: {
                "dataset": run.dataset,
                **_stages(run_settings(config, name), config.prepare[run.dataset].max_length),
            }
            for name, run in config.runs.items()
        },
    }


def run_settings(config: Config, run: str) -> RunSettings:
    """Return the sections of `run` with its overrides merged in. Raises ValidationError if one is wrong."""
    overrides = config.runs[run]
    return RunSettings.model_validate(
        {
            name: _merged(getattr(config, name).model_dump(), getattr(overrides, name))
            for name in RunSettings.model_fields
        }
    )


def device_precision(hardware: Hardware) -> str:
    """Return the precision a device computes in best: bf16 from compute capability 8.0 on, fp16 below,
    fp32 on CPU (where bf16 is slower and DeepSpeed refuses fp16)."""
    if hardware.device == "cpu":
        return "fp32"
    assert hardware.compute_capability is not None
    return "bf16" if hardware.compute_capability >= 8.0 else "fp16"


def own_json(strategy: str) -> dict[str, Any] | None:
    """Return the content of the user's own DeepSpeed JSON, None for a named strategy."""
    return read_json(Path(strategy), "your editor") if OWN_JSON.fullmatch(strategy) else None


def models_by_source(config: Config) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return (source, {name: model}) for each group of `fetch`."""
    return [(source, getattr(config.fetch, source)) for source in Fetch.model_fields if source != "data"]


def _stages(settings: RunSettings, max_length: int) -> dict[str, Any]:
    hardware, train = settings.hardware, settings.train
    precision = device_precision(hardware) if train.precision == "auto" else train.precision
    ranks = train.nodes * train.ranks_per_node
    batch = {
        "ranks": ranks,
        "micro_batch": train.micro_batch,
        "accumulation": train.global_batch // (train.micro_batch * ranks),
    }
    memory = {
        "device": hardware.device,
        "gpu_memory": parse_bytes(hardware.gpu_memory) if hardware.gpu_memory else None,
        "host_memory": parse_bytes(hardware.host_memory),
    }
    capacity = settings.pack.capacity or max_length
    return {
        "pack": {"packing": settings.pack.packing, "capacity": capacity if settings.pack.packing else None},
        "estimate": {
            **memory,
            "reserve": parse_bytes(settings.estimate.reserve),
            "ranks": ranks,
            "ranks_per_node": train.ranks_per_node,
            "micro_batch": train.micro_batch,
            "precision": precision,
            "activation_checkpointing": train.activation_checkpointing,
            "lora": {"r": train.lora.r, "targets": train.lora.targets},
        },
        "render": {
            **batch,
            "strategy": settings.render.strategy,
            "own_json": own_json(settings.render.strategy),
            "device": hardware.device,
            "precision": precision,
            "gradient_clipping": train.gradient_clipping,
        },
        "train": {
            **train.model_dump(exclude={"precision", "gradient_clipping"}),
            "device": hardware.device,
        },
        "merge": settings.merge.model_dump(),
        "report": {**settings.report.model_dump(), "strategy": settings.render.strategy},
    }


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result
