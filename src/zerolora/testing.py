"""Contract tests of registry entries, for packages that add some: each raises AssertionError if an entry breaks it."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.data.example import BadRow
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.reading import Reading
from zerolora.evaluate.tasks.task import Task
from zerolora.export.targets.target import ExportTarget
from zerolora.imports.formats.import_format import Format
from zerolora.methods.method import WHOLE_WEIGHTS, TrainableMethod
from zerolora.methods.peft_format import ADAPTER, CONFIG, read_alike
from zerolora.strategies.strategy import Strategy
from zerolora.train.objectives.objective import MARK, OF_TOKENS, Objective
from zerolora.train.telemetry.trackers import Tracker

if TYPE_CHECKING:
    from zerolora.config.method_sections import MethodSections
    from zerolora.optimizers.optimizer import Optimizer

LEAST_VOCABULARY = 5
"""Tokens of the vocabulary of `check_objective`."""


def check_form(form: Form) -> None:
    """Its example is detected and converted, and refused without any of its needed fields."""
    assert set(form.example) <= set(form.fields) and set(form.needed) <= set(form.fields)
    row = Row(form.example, Reading())
    assert form.detected(row), "it does not detect its example"
    example = form.convert(row)
    assert [example.messages, example.text, example.tokens].count(None) == 2
    for field in form.needed:
        try:
            form.convert(Row({key: value for key, value in form.example.items() if key != field}, Reading()))
        except BadRow:
            continue
        raise AssertionError(f"a row without {field} is converted")


def check_task(task: Task) -> None:
    """It accepts the right answer of its example and rejects the wrong one, and its metrics are those that it names."""
    task = task.configured(task.example.settings)
    row = {"question": task.example.question, "expected": task.example.expected, "prompt": 3}
    assert task.asks(row), "it does not ask its example"
    right, wrong = task.judge(row, task.example.right), task.judge(row, task.example.wrong)
    assert right.format and right.right == (task.ask != "loss") and not wrong.right
    assert right.scores.keys() == wrong.scores.keys()
    metrics = task.metrics([right, wrong])
    if task.ask != "loss":
        assert metrics["accuracy"] == 0.5
    means = {"generate": {"format_rate", "accuracy"}, "choices": {"accuracy"}, "loss": set()}[task.ask]
    assert set(metrics) == means | {*right.scores} | {*(task.corpus([right.material]) if task.corpus else ())}


def check_tracker(tracker: Tracker, folder: Path) -> None:
    """It records two steps below an existing folder. Its package must be installed."""
    run = tracker.start(folder, folder.name, {"learning_rate": 0.01})
    for step in (1, 2):
        run.log(step, {"loss": 1 / step})
    run.close()
    assert any(path.is_file() and path.stat().st_size for path in folder.rglob("*")), f"nothing is in {folder}"


def check_objective(objective: Objective) -> None:
    """It returns its terms and metrics, each with a value for every item, which do not depend on the micro-batch."""
    import torch

    assert {*objective.terms.values(), *objective.metrics.values(), *objective.before.values()} <= {*objective.units}
    whole = _values(objective, 0, 4)
    parts = [_values(objective, first, first + 2) for first in (0, 2)]
    assert whole.keys() == {*objective.terms, *objective.metrics, *objective.before}
    for name, values in whole.items():
        torch.testing.assert_close(values, torch.cat([part[name] for part in parts]), msg=name)
    added = objective.memory(100, 1000)
    assert min(added) >= 0


def _values(objective: Objective, first: int, end: int) -> dict[str, Any]:
    """Return the items of terms, metrics and means of some of four rows, whose sequences have 3 to 5 tokens."""
    import numpy as np
    import torch

    from zerolora.train.loss import of_logits

    generator = torch.Generator().manual_seed(1)
    sequences = []
    for number in range(4):
        tokens = {column: [1] * (3 + number % 3) for column in objective.columns}
        row: dict[str, Any] = {name: int(torch.randint(2, (1,), generator=generator)) for name in objective.numbers}
        row |= teacher_columns(objective, 3 + number % 3)
        sequences.append(objective.sequences({**tokens, "source": 0, **row, "supervised": 3 + number % 3}))
    losses = [torch.rand(len(each["input_ids"]), generator=generator) for row in sequences for each in row]
    logits = [torch.randn(len(each), LEAST_VOCABULARY, generator=generator) for each in losses]
    count = len(sequences[0])
    chosen = [each for row in sequences[first:end] for each in row]
    sequence = torch.repeat_interleave(
        torch.arange(len(chosen)), torch.tensor([len(each["input_ids"]) for each in chosen])
    )
    others = {"input_ids", "labels", "source", MARK, OF_TOKENS}
    batch: dict[str, Any] = {
        "sequence": sequence,
        "source": torch.zeros_like(sequence),
        "sources": torch.zeros(len(chosen), dtype=torch.long),
        MARK: torch.ones_like(sequence),
        "numbers": {
            name: torch.tensor([float(each[name]) for each in chosen]).double() for name in chosen[0].keys() - others
        },
    }
    of_tokens = [each.get(OF_TOKENS, {}) for each in chosen]
    batch[OF_TOKENS] = {
        name: torch.from_numpy(np.concatenate([each[name] for each in of_tokens])) for name in of_tokens[0]
    }
    of_batch = torch.cat(losses[first * count : end * count])
    if head_loss := objective.head_loss(batch):
        of_batch = of_logits(torch.cat(logits[first * count : end * count]), torch.ones_like(sequence), head_loss)
    values = objective.values(of_batch, batch, dict.fromkeys(objective.before, 0.5))
    assert all(len(each.each) == len(each.source) for each in values.values())
    before = objective.values_before(of_batch, batch) if objective.before else {}
    return {name: each.each.detach() for name, each in values.items()} | before


def teacher_columns(objective: Objective, tokens: int, k: int = 2) -> dict[str, Any]:
    """Return the columns of a teacher (stage `teacher`) for a row of some supervised tokens, of LEAST_VOCABULARY
    tokens; empty for an objective without one."""
    import numpy as np

    from zerolora.train.objectives.distill import IDS, LOG_PROBABILITIES

    draw = np.random.default_rng(tokens)
    logs = np.sort(np.log(draw.dirichlet(np.ones(max(k, LEAST_VOCABULARY)), tokens)))[:, : -k - 1 : -1]
    ids = np.argsort(draw.random((tokens, max(k, LEAST_VOCABULARY))))[:, :k]
    columns: dict[str, Any] = {
        IDS: ids.astype(np.int32).ravel(),
        LOG_PROBABILITIES: logs.astype(np.float16).ravel(),
    }
    beside = np.log(np.maximum(1e-30, 1 - np.exp(logs).sum(1))).astype(np.float32)
    return {name: columns.get(name, beside) for name in objective.of_tokens}


def check_method(method: type[TrainableMethod], settings: "MethodSections", model: Path, folder: Path) -> None:
    """What it trains on a model has the estimated size, and filled with noise and saved in an empty folder it is merged
    as peft merges it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from zerolora.methods.registry import of_directory
    from zerolora.model.architecture import built_on_meta, config_of
    from zerolora.model.read_spec import read_model_spec

    base = AutoModelForCausalLM.from_pretrained(model)
    weights = copy.deepcopy(base.state_dict())
    torch.manual_seed(1)
    built = method.build(base, settings)
    trained = {key: parameter for key, parameter in built.named_parameters() if parameter.requires_grad}
    counted = method.of(settings).parameters(read_model_spec(model), 4)
    assert sum(parameter.numel() for parameter in trained.values()) == counted.trained
    assert max(parameter.numel() for parameter in trained.values()) == counted.largest_trained
    fresh = method.published(built, {key: tensor.clone() for key, tensor in trained.items()})
    assert any(method.is_untrained(key, tensor) for key, tensor in fresh.items()) == (method.peft_type is not None)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) / 10)
    published = {key: tensor.detach().clone() for key, tensor in method.published(built, trained).items()}
    assert not any(method.is_untrained(key, tensor) for key, tensor in published.items())
    save_file(published, folder / (ADAPTER if method.peft_type else WHOLE_WEIGHTS))
    if method.peft_type:
        config = json.dumps(read_alike(built).to_dict(), default=list)
        (folder / CONFIG).write_text(config, encoding="utf-8")
    updates = of_directory(folder).updates(folder, built_on_meta(config_of(model)))
    expected = (built.merge_and_unload() if method.peft_type else built).state_dict()
    assert {key for key, update in updates.items() if not update.optional} <= weights.keys()
    for key, value in weights.items():
        actual = updates[key].applied(value) if key in updates else value
        assert (key in updates) == (not torch.equal(actual, value)), key
        torch.testing.assert_close(actual, expected[key], msg=key)


def check_optimizer(optimizer: "Optimizer") -> None:
    """It makes a step, and has the states that it names."""
    import torch

    tensor = torch.nn.Parameter(torch.ones(64, 512))
    tensor.grad = torch.ones_like(tensor)
    built = optimizer.build([{"params": [tensor]}], 0.01, 0.0, optimizer.betas, optimizer.epsilon, on_host=True)
    built.step()
    assert not bool((tensor == 1).all()), "a step changes nothing"
    with optimizer.unpacked(built, optimizer.parts(tensor.shape)):
        missing = [name for name in optimizer.parts(tensor.shape) if name not in built.state[tensor]]
    assert not missing, f"it has no state {', '.join(missing)}"


def check_strategy(strategy: Strategy) -> None:
    """It describes itself for the docs, on one line each."""
    for text in (strategy.about, strategy.sharded, strategy.costs):
        assert text and "\n" not in text and "|" not in text


def check_target(target: ExportTarget) -> None:
    """Its settings have defaults, and the config has their section."""
    from zerolora.config.target_sections import ExportSections

    target.settings()
    assert ExportSections.model_fields[target.name].annotation is target.settings


def check_importer(format: Format) -> None:
    """Its files can be told from others: they all have one of its keys."""
    assert format.knows(format.needed)
    assert format.own


CHECKS: Mapping[str, Any] = {
    "formats": check_form,
    "tasks": check_task,
    "objectives": check_objective,
    "optimizers": check_optimizer,
    "strategies": check_strategy,
    "targets": check_target,
    "importers": check_importer,
}
"""The checks that need nothing but the entry, by registry."""
