"""Every preference objective against TRL's own trainers: losses, gradients and adapters of 20 steps.

Slow: TRL is imported, and trains each of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from training_plan import training_plan
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from zerolora.data.packing_plan import PackingPlan
from zerolora.train.feed import Batches, collate, prepared
from zerolora.train.loop import Totals
from zerolora.train.loss import make_chunked, token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.mismatched import mismatched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, BATCH, WORDS = 20, 4, 60
END = WORDS
SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>"}
CPU = torch.device("cpu")
RATE = 1e-3
# Ours; the trainer and its settings.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "sigmoid with SFT": ("dpo", {}, "DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    "hinge": ("dpo", {"loss": "hinge", "sft_weight": 0.0}, "DPO", {"loss_type": ["hinge"]}),
    "robust": (
        "dpo",
        {"loss": "robust", "label_smoothing": 0.2, "sft_weight": 0.0},
        "DPO",
        {"loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "length-normalized": (
        "dpo",
        {"loss": "length_normalized", "beta": 2.0, "sft_weight": 0.5},
        "DPO",
        {"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.5], "beta": 2.0},
    ),
    "ipo": ("ipo", {}, "DPO", {"loss_type": ["ipo"]}),
    "simpo with SFT": (
        "simpo",
        {"sft_weight": 0.5},
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.5, "beta": 2.0, "simpo_gamma": 0.5},
    ),
    "orpo": ("orpo", {"prompt_loss": True}, "ORPO", {}),
    "kto weighted": (
        "kto",
        {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        "KTO",
        {"desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word, w0 to w59, and one for the end."""
    vocabulary = {f"w{number}": number for number in range(WORDS)} | {
        SPECIAL["eos_token"]: END,
        SPECIAL["pad_token"]: END + 1,
    }
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def model(chunked: bool) -> Any:
    """Return a tiny Llama with an adapter whose factors are not zero, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=END + 1,
        eos_token_id=END,
        bos_token_id=None,
    )
    base = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    if chunked:
        make_chunked(base)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(base, lora)


def adapter(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".default." in name}


class Recorded:
    """Losses, the gradients of each step, and the adapter after the last."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.adapter: dict[str, torch.Tensor] = {}

    def step(self, loss: float, model: Any) -> None:
        self.losses.append(loss)
        gradients = {name: each.grad for name, each in adapter(model).items()}
        self.gradients.append({name: each.clone() for name, each in gradients.items() if each is not None})


class Watch(TrainerCallback):
    """Records the gradients of a Trainer's steps, and its losses from the logs."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **inputs: Any) -> None:
        self.recorded.step(0.0, inputs["model"])


def ours(name: str, settings: dict[str, Any], of: list[Any]) -> tuple[Recorded, list[int], list[int]]:
    """Return what our objective trains, the numbers of the rows in the order of the steps, and each row's partner."""
    plan = training_plan(objective=name, global_batch=BATCH, micro_batch=BATCH, **{name: settings})
    objective = OBJECTIVES[name].of(plan)
    pairs = objective.rows == "pairs"
    bare = preference_rows.pairs(of, False) if pairs else preference_rows.labelled(of, False)
    policy = model(chunked=True).eval()

    @torch.no_grad()
    def sums(sequences: list[dict[str, Any]]) -> list[float]:
        batch = collate([[each | {"source": 0}] for each in sequences], False, CPU)
        losses = token_losses(policy, batch).double()
        return (-torch.zeros(len(sequences)).double().index_add(0, batch["sequence"], losses)).tolist()

    def sequence(row: dict[str, Any], side: str = "") -> dict[str, Any]:
        return {key: row[f"{side}{key}"] for key in ("input_ids", "labels")}

    table = list(prepared(bare, objective))
    if pairs:
        columns = {"reference_chosen": sums([sequence(row) for row in table])}
        columns["reference_rejected"] = sums([sequence(row, "rejected_") for row in table])
    else:
        others = [mismatched(row, table[row["partner"]], row["longest"]) for row in table]
        columns = {"reference": sums([sequence(row) for row in table]), "reference_mismatched": sums(others)}
    rows = bare
    for column, values in columns.items() if objective.reference else ():
        rows = rows.add_column(column, values)
    rows = prepared(rows, objective)
    packing = PackingPlan(np.arange(len(rows) + 1), np.arange(len(rows), dtype=np.int32))
    feed = Batches(rows, packing, plan, 0, 1)
    assert feed.steps == STEPS
    optimizer = torch.optim.AdamW(adapter(policy).values(), lr=RATE, weight_decay=0.0)
    recorded, order = Recorded(), []
    for step in range(STEPS):
        order += feed.order[step].tolist()
        micro_batches, units = feed.at(step)
        totals = Totals(objective, units, 2, CPU)
        means: dict[str, float] = {}
        with torch.no_grad():
            for packed_rows in feed.at(step, before=True)[0] if objective.before else ():
                batch = collate(packed_rows, False, CPU)
                for mean, items in objective.values_before(token_losses(policy, batch), batch).items():
                    means[mean] = float(items.sum()) / units[objective.before[mean]]
        for packed_rows in micro_batches:
            batch = collate(packed_rows, False, CPU)
            terms = totals.add(objective.values(token_losses(policy, batch), batch, means))
            totals.weighted(terms, 1).backward()
        recorded.step(totals.loss, policy)
        optimizer.step()
        optimizer.zero_grad()
    recorded.adapter = {name: each.detach() for name, each in adapter(policy).items()}
    return recorded, order, [] if pairs else rows["partner"][:]


def theirs(
    trainer: str,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    mismatched_answers: list[list[int]],
    tokenizer: Any,
    folder: Path,
) -> Recorded:
    """Return what TRL trains on rows in order, KTO with these mismatched answers instead of those of its batch."""
    import trl
    from trl.experimental import cpo, orpo

    where: Any = {"DPO": trl, "KTO": trl, "CPO": cpo, "ORPO": orpo}[trainer]
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "train_sampling_strategy": "sequential",
    }
    recorded = Recorded()
    config = getattr(where, f"{trainer}Config")(**arguments | settings)
    policy = model(chunked=False)
    run = getattr(where, f"{trainer}Trainer")(
        model=policy,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch(recorded)],
    )
    if mismatched_answers:
        own = run.train_dataset.remove_columns("KL_completion_ids")
        run.train_dataset = own.add_column("KL_completion_ids", mismatched_answers)
    run.train()
    recorded.losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    recorded.adapter = {name: each.detach() for name, each in adapter(policy).items()}
    return recorded


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_adapter_are_those_of_trl(case: str, tokenizer: Any, tmp_path: Path) -> None:
    name, settings, trainer, options = CASES[case]
    of = preference_rows.texts(STEPS * BATCH, WORDS)
    of = [(prompt, [*chosen, END], [*rejected, END]) for prompt, chosen, rejected in of]
    actual, order, partners = ours(name, settings, of)
    rows = []
    for number in order:
        prompt, chosen, rejected = (text(each) for each in of[number])
        if trainer == "KTO":
            rows.append({"prompt": prompt, "completion": f" {chosen}", "label": number % 3 > 0})
        else:
            rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
    answers = [of[partners[number]][1] for number in order] if partners else []
    expected = theirs(trainer, options, rows, answers, tokenizer, tmp_path)
    assert len(expected.losses) == len(expected.gradients) == STEPS
    assert actual.losses == pytest.approx(expected.losses, abs=1e-5)
    for one, other in zip([*actual.gradients, actual.adapter], [*expected.gradients, expected.adapter], strict=True):
        assert one.keys() == other.keys() and len(one) == 8
        largest = max(1.0, *(each.abs().max().item() for each in other.values()))
        assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-5 * largest
    start = adapter(model(chunked=False))
    assert min((start[key] - actual.adapter[key]).abs().max().item() for key in start) > 1e-3


def text(ids: list[int]) -> str:
    """Return the words of tokens, without the end, which TRL appends."""
    return " ".join(f"w{number}" for number in ids if number != END)
