"""The disk space of a run."""

from zerolora.memory.gpu import PlannedRun
from zerolora.memory.host import checkpoint_bytes
from zerolora.memory.states import BYTES


def terms(run: PlannedRun) -> dict[str, int]:
    """Return the terms in bytes: base model, adapter, checkpoints, merged model, and what a node offloads to NVMe."""
    model, parameters = run.model.parameters * run.spec.width, run.parameters
    disk = {
        "model": model,
        "adapter": parameters.trained * BYTES["fp32"],
        "checkpoints": int((run.spec.keep_checkpoints + run.spec.keeps_best) * checkpoint_bytes(run)),
        "merged": model,
        "nvme": int(run.states.disk * run.spec.ranks_per_node),
    }
    return {**disk, "total": sum(disk.values())}
