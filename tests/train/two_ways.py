"""One rank that trains quantized models twice, read whole and shard by shard: python two_ways.py REQUEST OUTPUT.

REQUEST has "cases" by name, each with the files of a training (rank.Paths) and its settings. OUTPUT, of each rank, gets
the losses of each case's steps by reading. A process of its own, since a rank has one process group.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups

from zerolora.config.settings import TrainSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.model import added_tokens
from zerolora.model.manifest import located
from zerolora.train import base_model
from zerolora.train.adapter import adapt
from zerolora.train.engines import engine_class
from zerolora.train.feed import Batches, collate
from zerolora.train.loss import token_losses
from zerolora.train.rank import read_plan

STEPS = 4


def main() -> None:
    """Train every case in both ways."""
    request, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    engine_class("deepspeed").connect(None, torch.device("cpu"))  # type: ignore[arg-type]  # it does not read it
    result = {}
    for name, case in request.items():
        ways = {"shards": losses_of(case)}
        loading_of = base_model.loading_of
        vars(base_model)["loading_of"] = lambda *_: "whole"
        ways["whole"] = losses_of(case)
        vars(base_model)["loading_of"] = loading_of
        result[name] = ways
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    os._exit(0)  # as rank.py exits


def losses_of(case: dict[str, Any]) -> list[float]:
    """Return this rank's sum of the losses of each step."""
    paths = {name: Path(path) for name, path in case["paths"].items()}
    plan, config = read_plan(TrainSettings.model_validate(case["settings"]), paths["zero"])
    device, cls = torch.device("cpu"), engine_class(plan.engine)
    tokens = added_tokens.of_data(paths["data"])
    engine = cls(adapt(located(paths["weights"]), plan, config, device, tokens), config, plan, device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows, packing = open_split(paths["data"], "train"), open_plan(paths["packing"] / "train.arrow")
    batches = Batches(rows, packing, plan, rank, world)
    losses = []
    engine.train()
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2
        torch.manual_seed(step)
        micro_batches, units = batches.at(step)
        total = 0.0
        for micro_batch in micro_batches:
            loss = token_losses(engine, collate(micro_batch, False, device)).sum() / units["supervised token"]
            engine.backward(loss * engine.divisor)
            engine.step()
            total += loss.item()
        losses.append(total)
    engine.close()
    vars(groups)["_ZERO_PARAM_INTRA_PARALLEL_GROUP"] = None  # hpZ's, which DeepSpeed makes once a process
    del engine
    gc.collect()
    return losses


if __name__ == "__main__":
    main()
