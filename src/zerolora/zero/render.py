"""Write the DeepSpeed JSON of a run, and beside it why it is so.

zerolora render --settings JSON --estimate results/NAME/estimate.json
                --output results/NAME/zero.json --reasons results/NAME/render.json
"""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.zero.strategies import auto_values, strategy_json

NEVER = 10**9  # steps between DeepSpeed's own progress lines; the loop has a bar


def render(settings: dict[str, Any], estimate: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (DeepSpeed JSON, reasons) for a run's settings.

    What the training section says wins over the user's own JSON; reasons["overrides"] lists each key with both
    values. Raises UserError if strategy is auto and none fits.
    """
    predicted = read_json(estimate, "zerolora estimate")
    hidden, trainable = predicted["model"]["hidden"], predicted["model"]["trainable_parameters"]
    if settings["own_json"] is not None:
        chosen = f"your own {settings['strategy']}"
        config = _filled(settings["own_json"], hidden)
    else:
        name, chosen = _choose(settings["strategy"], predicted["strategies"])
        config = {"zero_optimization": strategy_json(name, hidden, trainable, settings["device"])}
    overrides = _override(config, _from_training(settings))
    for key in ("optimizer", "scheduler"):
        if key in config:
            overrides.append({"key": key, "json": config.pop(key), "training": "AdamW and train.schedule"})
    # The loop's own AdamW is stepped by torch: DeepSpeed need not know or compile an optimizer.
    config |= {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
    }
    return config, {"strategy": chosen, "overrides": overrides}


def _choose(strategy: str, predicted: list[dict[str, Any]]) -> tuple[str, str]:
    if strategy != "auto":
        return strategy, f"{strategy}, as render.strategy says"
    for entry in predicted:  # in order of stage: the lowest that fits moves the fewest bytes
        if entry["fits"]:
            return entry["strategy"], f"{entry['strategy']}, the lowest stage that fits"
    reasons = "; ".join(f"{entry['strategy']} {entry['why']}" for entry in predicted)
    raise UserError(
        f"render.strategy is auto and nothing fits: {reasons}; use more or larger GPUs, a smaller "
        "train.micro_batch, or train.activation_checkpointing: true"
    )


def _from_training(settings: dict[str, Any]) -> dict[str, Any]:
    precision = settings["precision"]
    return {
        "train_micro_batch_size_per_gpu": settings["micro_batch"],
        "gradient_accumulation_steps": settings["accumulation"],
        "train_batch_size": settings["micro_batch"] * settings["accumulation"] * settings["ranks"],
        "gradient_clipping": settings["gradient_clipping"],
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }


def _override(config: dict[str, Any], training: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Put `training` into `config` and return what that changed of the user's own values."""
    changed = []
    for key, value in training.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            changed += _override(config.setdefault(key, {}), value, f"{name}.")
            continue
        if key in config and config[key] not in (value, "auto"):
            changed.append({"key": name, "json": config[key], "training": value})
        config[key] = value
    return changed


def _filled(own: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Return a user's JSON with "auto" in its stage-3 sizes replaced, and stage 0 where it names none."""
    zero = {"stage": 0, **own.get("zero_optimization", {})}
    known = auto_values(hidden)
    for key, value in zero.items():
        if value == "auto":
            if key not in known:
                raise UserError(f"render.strategy: zero_optimization.{key} is 'auto' in your JSON; write its value")
            zero[key] = known[key]
    return {**own, "zero_optimization": zero}


def lines(reasons: dict[str, Any]) -> str:
    """Return the reasons as lines for people."""
    overrides = [
        f"  {entry['key']}: your JSON says {entry['json']!r}, training says {entry['training']!r}: the latter wins"
        for entry in reasons["overrides"]
    ]
    return "\n".join([f"strategy: {reasons['strategy']}", *overrides])
