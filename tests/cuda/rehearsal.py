"""Training and evaluation on fake GPUs: `python rehearsal.py FOLDER CASES`. Prints the faults of each case as JSON."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import fake_gpu
import torch
import torch.distributed
from datasets import Dataset
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_plan import training_plan

from zerolora.config.settings import EvaluateSettings
from zerolora.errors import UserError
from zerolora.evaluate import evaluated_models, generation
from zerolora.evaluate.evaluate import loss
from zerolora.evaluate.merged_logits import next_tokens
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.adapter import adapt
from zerolora.train.engines.ddp import DDP, _compute_in
from zerolora.train.engines.engine import trained
from zerolora.train.feed import collate
from zerolora.train.loop import Totals
from zerolora.train.loss import token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.telemetry.routers import Routers

LENGTHS = (17, 30, 12)


class Engine(DDP):
    """DDP of one rank, which has nothing to reduce."""

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        model.to(device)
        _compute_in(dtype, model)
        self.engine = model
        return model

    def forward(self, **inputs: Any) -> Any:
        return self.engine(**inputs)


def train(weights: Path, settings: dict[str, Any], packed: bool, objective: str) -> list[str]:
    """Return the faults of a step."""
    plan = training_plan(device="cuda", **settings)
    goal = OBJECTIVES[objective]
    config = ZeroJson(options={"gradient_clipping": 1.0}, choice=plan)
    device = torch.device(fake_gpu.NAME, 0)
    with fake_gpu.computing():
        model = adapt(weights, plan, config, device)
        engine = Engine(model, config, plan, device)
        faults = [f"{name} is on {each.device}" for name, each in places_of(engine.module) if each.device != device]
        engine.train()
        routers = Routers(engine.module)
        rows = [row_of(length, goal) for length in LENGTHS]
        batches = [[rows[:2], rows[2:]]] if packed else [[[row] for row in rows]]
        totals = Totals(goal, {name: 1 for name in goal.units}, 1)
        for micro_batch in batches:
            batch = collate(micro_batch, packed, device)
            with routers.watched(micro_batch, batch):
                values = goal.values(token_losses(engine, batch), batch, {name: 1.0 for name in goal.before})
            terms = totals.add(values)
            engine.backward(totals.weighted(terms, engine.divisor))
            for name, parameter in trained(engine.module).items():
                if parameter.grad is None:
                    faults.append(f"{name} has no gradient")
                elif parameter.grad.device != device or parameter.grad.dtype != torch.float32:
                    faults.append(f"the gradient of {name} is {parameter.grad.dtype} on {parameter.grad.device}")
            engine.step()
        for parameter, state in engine.inner.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device and value.ndim:
                    faults.append(f"state {name} is on {value.device}")
    return faults


def evaluate(weights: Path, spread: bool) -> list[str]:
    """Return the faults of generation, of the loss and of the logits that a merged model is compared by; of a model
    `spread` over two GPUs, or on one."""
    device = torch.device(fake_gpu.NAME, 0)
    rows = Dataset.from_list(
        [
            {"input_ids": list(range(3, 3 + length)), "labels": [-100] * 9 + [1] * (length - 9), "prompt": 9 + length % 3}
            | {"length": length}
            for length in (20, 15, 31, 17, 26, 22)
        ]
    )
    settings = EvaluateSettings(check="exact", batch=6, max_new_tokens=5)
    if spread:
        layers = json.loads((weights / "config.json").read_text())["num_hidden_layers"]
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        places |= {f"model.layers.{layer}": int(layer > 0) for layer in range(layers)}
        evaluated_models.placement = lambda *_: {"device_map": places}
    with fake_gpu.computing():
        model, tokenizer = evaluated_models.load(weights, device, [])
        faults = [f"{name} is on {each.device}" for name, each in places_of(model) if each.device.type != device.type]
        generation.generate(model, tokenizer, rows, {2}, settings, silent=True)
        loss(model, rows)
        next_tokens(model, rows)
    return faults


def half_ended(answers: torch.Tensor, *others: Any) -> list[int | None]:
    """Return that every second answer has ended, as `_ends` does of real ones."""
    ENDS(answers, *others)
    return [answers.shape[1] if index % 2 else None for index in range(len(answers))]


ENDS = generation._ends
generation._ends = half_ended


def places_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def row_of(length: int, goal: Any) -> dict[str, Any]:
    tokens = list(range(5, 5 + length))
    row = {"labels": [-100, -100, *tokens[2:]], "input_ids": tokens, "source": 0}
    return row | {name: 1.0 for name in goal.numbers}


def main() -> None:
    fake_gpu.set_up(count=2)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    results = {}
    for case in json.loads(sys.argv[1]):
        import time
        t = time.process_time()
        try:
            if "settings" in case:
                faults = train(Path(case["weights"]), case["settings"], case["packed"], case["objective"])
            else:
                faults = evaluate(Path(case["weights"]), case["spread"])
        except UserError as error:
            faults = [f"refused: {error}"]
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            places_ = [f"{Path(each.filename).name}:{each.lineno} {each.line}" for each in frames][-14:]
            faults = [f"{type(error).__name__}: {str(error)[:300].splitlines()[0]}", *places_]
        results[case["name"]] = faults
        print(case["name"], round(time.process_time() - t, 2), *faults, sep="\n   ", flush=True)


main()
