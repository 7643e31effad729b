"""Stage estimate: bytes per GPU and per host of every strategy, before anything runs.

zerolora estimate --settings JSON --model resources/models/MODEL --packing results/NAME/packing
                  --output results/NAME/estimate.json
"""

from pathlib import Path
from typing import Any

from zerolora.files import read_json
from zerolora.memory.activations import layer_activations, logits
from zerolora.memory.shapes import Shape, adapter_parameters, read_shape
from zerolora.memory.states import BYTES, MAX_LIVE_PARAMETERS, STRATEGIES, Sharding, model_states
from zerolora.units import gib

# Resident set of a rank that has imported torch, deepspeed, transformers and peft and loaded nothing;
# measured by benchmarks/process_memory.py.
PROCESS_BYTES = 375 * 1024**2


def estimate(settings: dict[str, Any], model: Path, packing: Path) -> dict[str, Any]:
    """Return the estimate of every strategy for this model directory, LoRA and packing plan, in bytes.

    Only config.json and stats.json are read. Raises UserError if they are missing or say too little.
    """
    shape = read_shape(model)
    longest = read_json(packing / "stats.json", "zerolora pack")["longest_packed_row"]
    trainable = adapter_parameters(shape, settings["lora"]["r"], settings["lora"]["targets"])
    return {
        "model": {
            "frozen_parameters": shape.parameters,
            "trainable_parameters": trainable,
            "hidden": shape.hidden,
            "counted_from": shape.counted,
        },
        "longest_packed_row": longest,
        "capacity": {"gpu": settings["gpu_memory"], "host": settings["host_memory"]},
        "strategies": [
            _one(name, sharding, shape, trainable, longest, settings) for name, sharding in STRATEGIES.items()
        ],
    }


def _one(
    name: str, sharding: Sharding, shape: Shape, trainable: int, longest: int, settings: dict[str, Any]
) -> dict[str, Any]:
    precision, ranks, local = settings["precision"], settings["ranks"], settings["ranks_per_node"]
    states = model_states(shape.parameters, trainable, sharding, ranks, precision)
    rows = settings["micro_batch"]
    size = BYTES[precision]
    on_cpu = settings["device"] == "cpu"
    terms = {
        "frozen_weights": states.frozen_weights,
        "adapter_weights": states.trainable_weights,
        "gradients": states.gradients,
        "master": states.master,
        "moments": states.moments,
        "activations": layer_activations(shape, rows, longest, precision, settings["activation_checkpointing"]),
        "logits": logits(shape, rows, longest, precision),
        "gathered": min(shape.parameters, MAX_LIVE_PARAMETERS) * size if sharding.stage == 3 else 0,
        "reserve": 0 if on_cpu else settings["reserve"],
    }
    gpu = {term: int(value) for term, value in terms.items()}
    gpu["model_states"] = int(states.total)
    gpu["total"] = sum(value for term, value in gpu.items() if term != "model_states")
    # Stage 3 keeps only its share while it reads; the other stages hold the model once a rank before it moves.
    loading = shape.parameters * size / (ranks if sharding.stage == 3 else 1)
    host = {
        "processes": PROCESS_BYTES * local,
        "offload": int(states.host * local),
        "loading": 0 if on_cpu else int(loading * local),
        "ranks": gpu["total"] * local if on_cpu else 0,
    }
    host["total"] = sum(host.values())
    fits, why = _verdict(gpu["total"], host["total"], settings)
    return {"strategy": name, "gpu": gpu, "host": host, "fits": fits, "why": why}


def _verdict(gpu: int, host: int, settings: dict[str, Any]) -> tuple[bool, str]:
    if settings["device"] == "cuda" and gpu > settings["gpu_memory"]:
        return False, f"needs {gib(gpu)} of a GPU's {gib(settings['gpu_memory'])}"
    if host > settings["host_memory"]:
        return False, f"needs {gib(host)} of a host's {gib(settings['host_memory'])}"
    return True, "fits"


def table(result: dict[str, Any]) -> str:
    """Return the estimate as a table for people."""
    model = result["model"]
    lines = [
        f"{model['frozen_parameters']:,} frozen and {model['trainable_parameters']:,} trainable parameters, "
        f"longest packed row {result['longest_packed_row']} tokens (GiB)",
        f"{'strategy':<15}{'states':>9}{'activations':>13}{'logits':>9}{'GPU':>9}{'host':>9}  fits",
    ]
    for entry in result["strategies"]:
        gpu, host = entry["gpu"], entry["host"]
        numbers = (gpu["model_states"], gpu["activations"], gpu["logits"], gpu["total"], host["total"])
        cells = "".join(
            f"{value / 1024**3:>{width}.2f}" for value, width in zip(numbers, (9, 13, 9, 9, 9), strict=True)
        )
        lines.append(f"{entry['strategy']:<15}{cells}  {'yes' if entry['fits'] else 'no: ' + entry['why']}")
    return "\n".join(lines)
