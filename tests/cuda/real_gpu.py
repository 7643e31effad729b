"""What this machine's GPU computes, beside the CPU in fp32: `python real_gpu.py FILE`, with the cases in the file.

A train case is a forward and backward pass with the case's settings, then its optimizer's step; the CPU does the same
with the same weights and adapter, in fp32. An evaluate case is the loss of held-out rows, and
answers. Prints a line of JSON for each case: its name, its figures, and what failed.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_plan import training_plan

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.left_out import leave_out

leave_out("torchao")
bitsandbytes_patches.load()
from cases import LENGTHS, ROWS, Engine, row_of  # noqa: E402 (not before the patches)

from zerolora.config.settings import EvaluateSettings  # noqa: E402
from zerolora.errors import UserError  # noqa: E402
from zerolora.evaluate import evaluated_models, generation  # noqa: E402
from zerolora.evaluate.row_losses import loss  # noqa: E402
from zerolora.planner.zero_json import ZeroJson  # noqa: E402
from zerolora.train.adapter import adapt  # noqa: E402
from zerolora.train.engines.engine import plain, trained  # noqa: E402
from zerolora.train.feed import collate  # noqa: E402
from zerolora.train.loop import Totals  # noqa: E402
from zerolora.train.loss import token_losses  # noqa: E402
from zerolora.train.objectives import OBJECTIVES  # noqa: E402
from zerolora.train.telemetry.routers import Routers  # noqa: E402

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DROPOUTS = {"dropout", "attention_dropout", "activation_dropout", "attn_pdrop", "resid_pdrop"}
NOISE = 0.02
"""The standard deviation of what is added to the adapter, whose second factor begins as zeros."""


class Bench:
    """A model with its adapter and engine on a device."""

    def __init__(self, weights: str, settings: dict[str, Any], packed: bool, objective: str, device: torch.device):
        plan = training_plan(**{**settings, "device": "cuda" if device == GPU else "cpu"})
        config = ZeroJson(options={"gradient_clipping": 1.0}, choice=plan)
        self.goal, self.packed, self.device = OBJECTIVES[objective], packed, device
        self.engine = Engine(adapt(Path(weights), plan, config, device), config, plan, device)
        self.engine.train()
        for module in self.engine.module.modules():  # a device draws its own
            for name in DROPOUTS & vars(module).keys():
                setattr(module, name, 0.0)
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.trained = {plain(name): each for name, each in trained(self.engine.module).items()}

    def pass_of(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and the gradients."""
        rows = [row_of(length, self.goal) for length in LENGTHS]
        micro_batch = [[*rows[0], *rows[1]], rows[2]] if self.packed else [[each] for row in rows for each in row]
        totals = Totals(self.goal, dict.fromkeys(self.goal.units, 1), 1, self.device)
        batch = collate(micro_batch, self.packed, self.device)
        for parameter in self.trained.values():
            parameter.grad = None
        with Routers(self.engine.module).watched(micro_batch, batch, True):
            losses = token_losses(self.engine, batch, self.goal.head_loss(batch))
            values = self.goal.values(losses, batch, dict.fromkeys(self.goal.before, 1.0))
        self.engine.backward(totals.weighted(totals.add(values), self.engine.divisor))
        gradients = {name: each.grad for name, each in self.trained.items() if each.grad is not None}
        return losses.detach().cpu(), {name: each.detach().clone().cpu() for name, each in gradients.items()}


def train(weights: str, settings: dict[str, Any], packed: bool, objective: str) -> dict[str, Any]:
    """Return how far the GPU's losses and gradients are from the CPU's, and whether they repeat."""
    reference = {**settings, "precision": "fp32", "optimizer": "adamw"}
    gpu = Bench(weights, settings, packed, objective, GPU)
    cpu = Bench(weights, reference, packed, objective, CPU)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = gpu.trained, cpu.trained
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            noise = NOISE * torch.randn(parameter.shape, generator=generator)
            changed = parameter.detach().cpu().float() + (0 if settings["method"] == "full" else noise)
            parameter.copy_(changed)
            theirs[name].copy_(changed)
    (losses, gradients), (again, once_more) = gpu.pass_of(), gpu.pass_of()
    expected, wanted = cpu.pass_of()
    assert gradients.keys() == wanted.keys()
    before = {name: each.detach().clone() for name, each in ours.items()}
    gpu.engine.step()
    torch.cuda.synchronize()
    return {
        "loss": float(expected.mean()),
        "loss_error": float((losses - expected).abs().max()),
        "gradient_error": distance(gradients, wanted),
        "gradient_norm": norm(wanted),
        "repeats": {"losses": torch.equal(losses, again), "gradients": distance(gradients, once_more)},
        "unchanged": sum(torch.equal(before[name], each) for name, each in ours.items()),
        "not_finite": sum(not bool(each.isfinite().all()) for each in ours.values()),
    }


def norm(gradients: dict[str, torch.Tensor]) -> float:
    """Return the norm of all gradients together."""
    return float(sum(each.double().square().sum() for each in gradients.values()) ** 0.5)


def distance(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference, over that of the wanted."""
    return norm({name: each.double() - wanted[name].double() for name, each in gradients.items()}) / norm(wanted)


def evaluate(weights: str, layers: int = 0) -> dict[str, Any]:
    """Return the loss and the answers of both devices; `layers` are those of a model on two GPUs, here of one."""
    settings = EvaluateSettings(check="exact", batch=6, max_new_tokens=8)
    result: dict[str, Any] = {}
    for device in (GPU, CPU):
        model, tokenizer = evaluated_models.load(Path(weights), device, [])
        answers = generation.generate(model, tokenizer, ROWS, {2}, settings, silent=True)
        result[device.type] = {"loss": repr(loss(model, ROWS)), "answers": repr(answers)[:2000]}
    result["same_answers"] = result["cuda"]["answers"] == result["cpu"]["answers"]
    return result


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "evaluate": evaluate}


def main() -> None:
    """Print the line of each case."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    file = Path(sys.argv[1])
    cases = json.loads(file.read_text())
    for name, kind, arguments in list(cases):
        if kind == "train" and arguments["settings"]["precision"] == "fp32":
            half = {"settings": arguments["settings"] | {"precision": "bf16"}}
            cases.append((f"{name} bf16", kind, arguments | half))
    for name, kind, arguments in cases:
        if kind not in KINDS or arguments.get("layers"):
            continue
        result, failed = {}, None
        arguments["weights"] = str(file.parent / Path(arguments["weights"]).name)
        try:
            result = KINDS[kind](**arguments)
        except UserError as error:
            failed = f"refused: {error}"
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f"{Path(each.filename).name}:{each.lineno}" for each in frames]
            failed = f"{type(error).__name__} in {', '.join(own[-5:])}: {str(error)[:500]}"
        print(json.dumps([name, arguments, result, failed]), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
