"""What the cases on fake GPUs (rehearsal.py) and on a real one (real_gpu.py) compute with."""

from typing import Any

import pyarrow
import torch
from datasets import Dataset

from zerolora.planner.zero_json import ZeroJson
from zerolora.testing import teacher_columns
from zerolora.train.engines.ddp import DDP, _compute_in
from zerolora.train.objectives.objective import Objective

LENGTHS = (17, 30, 12)
ROWS = Dataset(
    pyarrow.Table.from_pylist(
        [
            {"input_ids": list(range(3, 3 + length)), "labels": [-100] * 9 + [1] * (length - 9)}
            | {"prompt": 9 + length % 3, "length": length}
            for length in (20, 15, 31, 17, 26, 22)
        ]
    ),
    fingerprint="rows",
)


class Engine(DDP):
    """DDP of one rank, which has nothing to reduce."""

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        model.to(device)
        _compute_in(dtype, model)
        self.engine = model
        return model

    def forward(self, **inputs: Any) -> Any:
        return self.engine(**inputs)


def row_of(length: int, goal: Objective) -> list[dict[str, Any]]:
    """Return the sequences of a prepared row."""
    tokens = list(range(5, 5 + length))
    row: dict[str, Any] = {name: [-100, -100, *tokens[2:]] if "labels" in name else tokens for name in goal.columns}
    row |= teacher_columns(goal, length - 2)
    return goal.sequences(row | {"source": 0} | dict.fromkeys(goal.numbers, 1.0))
