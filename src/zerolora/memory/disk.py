"""What a run writes to disk and reads from it."""

from zerolora.memory.gpu import PlannedRun
from zerolora.memory.host import checkpoint_bytes
from zerolora.memory.states import BYTES

CHECKPOINTS = 2  # kept beside each other; the best one is kept as well


def terms(run: PlannedRun) -> dict[str, int]:
    """Return the terms in bytes: base model, adapter, checkpoints and merged model once, what is offloaded to NVMe once
    a node."""
    model, parameters = run.model.parameters * run.spec.width, run.parameters
    disk = {
        "model": model,
        "adapter": parameters.trained * BYTES["fp32"] if parameters.frozen else 0,
        "checkpoints": (CHECKPOINTS + run.spec.keeps_best) * parameters.trained * checkpoint_bytes(run),
        "merged": model,
        "nvme": int(run.states.disk * run.spec.ranks_per_node),
    }
    return {**disk, "total": sum(disk.values())}
