"""What the jobs of one machine may use together, as its config describes it: the resources that Snakemake counts."""

from collections.abc import Iterable, Mapping

from zerolora.config.schema import RunSections
from zerolora.machine.devices import visible_names
from zerolora.units import parse_bytes


def hardware_limits(runs: Iterable[RunSections], environment: Mapping[str, str]) -> dict[str, int]:
    """Return the limits `gpu`, if a run uses GPUs, and `mem_mb`, in MiB, of jobs that run on this machine together.

    GPUs are those of all nodes that a run trains on; CUDA_VISIBLE_DEVICES in `environment` has the last word about the
    GPUs of a node.
    """
    sections = list(runs)
    names = visible_names(environment)
    gpus = [
        run.train.nodes * (run.hardware.gpus_per_node if names is None else len(names))
        for run in sections
        if run.hardware.device == "cuda"
    ]
    limits = {"mem_mb": max(parse_bytes(run.hardware.host_memory) for run in sections) // 1024**2}
    return {**limits, "gpu": max(gpus)} if gpus else limits
