"""Training, evaluation and probe on fake GPUs (fake_gpu.py): `python rehearsal.py FILE`, with the cases in the file."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bitsandbytes
import fake_gpu
import torch
import torch.distributed
from cases import LENGTHS, ROWS, Engine, row_of
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_plan import training_plan

from zerolora.config.method_sections import Quantization
from zerolora.config.settings import EvaluateSettings
from zerolora.errors import UserError
from zerolora.evaluate import evaluated_models, frozen_model, generation, reference_log_probabilities
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.merged_logits import next_tokens, of_base, of_merged
from zerolora.evaluate.row_losses import loss
from zerolora.model import rope
from zerolora.model.added_tokens import of_data
from zerolora.planner.zero_json import ZeroJson
from zerolora.probe import probe_rank
from zerolora.train.adapter import adapt
from zerolora.train.engines.engine import DTYPES, trained
from zerolora.train.feed import collate
from zerolora.train.loop import Totals
from zerolora.train.loss import token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.telemetry.routers import Routers

fake_gpu.set_up(count=2)
DEVICE = torch.device(fake_gpu.NAME, 0)
_GROWS = rope._grows


def grows(module: Any, length: int) -> bool:
    """Try a module's factors with real tensors: it does so on the CPU, with a module made of the config."""
    with unset_fake_temporarily():
        return _GROWS(module, length)


rope._grows = grows


def train(weights: str, settings: dict[str, Any], packed: bool, objective: str) -> list[str]:
    """Return the faults of a step."""
    plan = training_plan(device="cuda", **settings)
    goal = OBJECTIVES[objective]
    config, device = ZeroJson(options={"gradient_clipping": 1.0}, choice=plan), DEVICE
    with fake_gpu.computing():
        model = adapt(Path(weights), plan, config, device)
        engine = Engine(model, config, plan, device)
        faults = [f"{name} is on {each.device}" for name, each in places_of(engine.module) if each.device != device]
        base = engine.module.get_base_model() if hasattr(engine.module, "get_base_model") else engine.module
        in_fp32 = set(base._keep_in_fp32_modules or ()) if plan.precision == "fp16" else set()
        for name, each in engine.module.named_parameters():
            stays = each.requires_grad or in_fp32 & set(name.split("."))
            kind = torch.float32 if stays else DTYPES[plan.precision]
            if each.is_floating_point() and each.dtype != kind:
                faults.append(f"{name} is {each.dtype}")
        engine.train()
        routers = Routers(engine.module)
        rows = [row_of(length, goal) for length in LENGTHS]
        packed_rows = [[*rows[0], *rows[1]], rows[2]] if packed else [[each] for row in rows for each in row]
        totals = Totals(goal, dict.fromkeys(goal.units, 1), 1, device)
        for micro_batch in [packed_rows]:
            batch = collate(micro_batch, packed, device)
            with routers.watched(micro_batch, batch, True):
                losses = token_losses(engine, batch, goal.head_loss(batch))
                values = goal.values(losses, batch, dict.fromkeys(goal.before, 1.0))
            terms = totals.add(values)
            engine.backward(totals.weighted(terms, engine.divisor))
            for name, parameter in trained(engine.module).items():
                if parameter.grad is None:
                    faults.append(f"{name} has no gradient")
                elif parameter.grad.device != device or parameter.grad.dtype != torch.float32:
                    faults.append(f"the gradient of {name} is {parameter.grad.dtype} on {parameter.grad.device}")
            engine.step()
        for state in engine.inner.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device and value.ndim:
                    faults.append(f"state {name} is on {value.device}")
    return faults


def evaluate(weights: str, layers: int = 0) -> list[str]:
    """Return the faults of generation, of the loss and of the logits that a merged model is compared by, of a model on
    one GPU, or of its `layers` layers on two."""
    settings = EvaluateSettings(check="exact", batch=6, max_new_tokens=3)
    with spread(layers), fake_gpu.computing():
        model, tokenizer = evaluated_models.load(Path(weights), DEVICE, [])
        faults = [f"{name} is on {each.device}" for name, each in places_of(model) if each.device.type != DEVICE.type]
        generation.generate(model, tokenizer, ROWS, {2}, settings, silent=True)
        loss(model, ROWS)
        next_tokens(model, ROWS)
    return faults


def compare(weights: str, adapter: str, data: str, layers: int = 0) -> list[str]:
    """Return the faults of the comparison of a merged model with base and adapter, on one GPU or on two."""
    with spread(layers), fake_gpu.computing():
        merged = next_tokens(evaluated_models.load(Path(weights), DEVICE, [])[0], ROWS)
        model = EvaluatedModel(Path(weights), Path(adapter), Path(weights), "cuda")
        base, tuned, _ = of_base(model, Path(data), ROWS)
        of_merged(merged, base, tuned, model, Path(data), ROWS)
    return []


def refer(weights: str, adapter: str | None = None, quantization: Any = None, layers: int = 0) -> list[str]:
    """Return the faults of the log-probabilities of a reference, on one GPU or on two."""
    tokens, chosen = of_data(Path(weights).parent / "data"), Quantization(type=quantization) if quantization else None
    module: Any = frozen_model
    module.check_loss, module.shares_prefixes = lambda *_: None, lambda *_: True  # they compare values
    with spread(layers), fake_gpu.computing():
        own = Path(adapter) if adapter else None
        model, prefixes = frozen_model.load(Path(weights), tokens, DEVICE, "bf16", chosen, own)
        faults = [f"{name} is on {each.device}" for name, each in places_of(model) if each.device.type != DEVICE.type]
        sequences = [row_of(length, OBJECTIVES["sft"])[0] for length in LENGTHS]
        reference_log_probabilities.log_probabilities(model, sequences, prefixes)
    return faults


@contextlib.contextmanager
def spread(layers: int) -> Iterator[None]:
    """Load Llamas of this many layers, unless 0, as one that does not fit on a GPU: all but one layer on the second."""
    own, modules = evaluated_models.placement, cast(Any, (evaluated_models, frozen_model))
    if layers:
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        places |= {f"model.layers.{layer}": int(layer > 0) for layer in range(layers)}
        for module in modules:
            module.placement = lambda *_, **__: {"device_map": places}
    try:
        yield
    finally:
        for module in modules:
            module.placement = own


def half_ended(answers: torch.Tensor, *others: Any) -> list[int | None]:
    """Return that every second answer has ended, as `_ends` does of real ones."""
    ENDS(answers, *others)
    return [answers.shape[1] if index % 2 else None for index in range(len(answers))]


ENDS = generation._ends
answering: Any = generation
answering._ends = half_ended


def places_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def once(rank: probe_rank.Rank, measure: probe_rank.Measure) -> float:
    """Measure without the other ranks."""
    measure()
    rank._settle()
    return 1.0


def probe() -> list[str]:
    """Return the faults of the probe's measurements, but for the collectives."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    module: Any = probe_rank
    module.rendezvous, module.dist = lambda _: None, SimpleNamespace(new_group=lambda *_, **__: None)
    module.Rank._mine, module.Rank.seconds = lambda *_: None, once
    with fake_gpu.computing():
        rank = probe_rank.Rank("cuda")
        for dtype in (torch.float32, torch.bfloat16):
            probe_rank._matmul(rank, dtype)
        probe_rank._issuing(rank)
        measured = probe_rank._copying(rank)
    return [f"{name} is not measured" for name, value in measured.items() if value is None]


def checked() -> list[str]:
    """Return which mistakes a fake GPU accepts, of those that a GPU refuses."""
    with fake_gpu.computing():
        return _accepted()


def _accepted() -> list[str]:
    lengths = torch.tensor([0, 4], dtype=torch.int32)

    def attend(size: int, own: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        heads = [torch.zeros(4, 2, width, dtype=dtype, device=DEVICE) for width in (size, size, own)]
        return varlen_attn(heads[0], heads[1], heads[2], lengths.to(DEVICE), lengths.to(DEVICE), 4, 4)

    def grouped(rows: int) -> Any:
        one, other = torch.zeros(8, rows, device=DEVICE), torch.zeros(2, 16, rows, device=DEVICE)
        ends = torch.tensor([4, 8], dtype=torch.int32).to(DEVICE)
        return torch._grouped_mm(one.bfloat16(), other.bfloat16().transpose(1, 2), ends)

    here, there = torch.zeros(4, device=DEVICE), torch.zeros(2, dtype=torch.long, device=f"{fake_gpu.NAME}:1")
    mistakes: dict[str, Callable[[], Any]] = {
        "a tensor left on the CPU": lambda: here + torch.zeros(4),
        "an index on another GPU": lambda: here[there],
        "heads of two sizes": lambda: attend(16, 24),
        "heads of 20": lambda: attend(20, 20),
        "heads of 264": lambda: attend(264, 264),
        "attention in fp32": lambda: attend(16, 16, torch.float32),
        "a grouped product of rows of 6 bytes": lambda: grouped(3),
        "blocks of 48": lambda: bitsandbytes.functional.quantize_4bit(here.bfloat16(), blocksize=48),
    }
    for correct in (lambda: attend(16, 16), lambda: grouped(8), lambda: here[there.to(DEVICE)]):
        correct()
    result = []
    for name, make in mistakes.items():
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):
            make()
            result.append(name)
    return result


KINDS: dict[str, Callable[..., list[str]]] = {
    "train": train,
    "evaluate": evaluate,
    "compare": compare,
    "refer": refer,
    "probe": probe,
    "checked": checked,
}


def main() -> None:
    """Print a line of JSON for each case: its name, its faults, and the line with which it is refused."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for name, kind, arguments in json.loads(Path(sys.argv[1]).read_text()):
        faults, refused = [], None
        try:
            faults = KINDS[kind](**arguments)
        except UserError as error:
            refused = str(error)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f"{Path(each.filename).name}:{each.lineno}" for each in frames if "/src/zerolora/" in each.filename]
            faults = [f"{type(error).__name__} in {', '.join(own[-3:])}: {str(error)[:300]}"]
        print(json.dumps([name, faults, refused]), flush=True)


if __name__ == "__main__":
    main()
