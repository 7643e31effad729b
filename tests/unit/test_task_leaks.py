"""Training rows whose prompt also occurs in an evaluation task are counted in the metrics of the base model."""

import json
import random
import shutil
from pathlib import Path

import pytest

from zerolora.config.schema import Split
from zerolora.config.settings import AskedTaskSettings, HarnessTaskSettings, PrepareSettings, TaskRowsSettings
from zerolora.data.prepare import prepare
from zerolora.data.task_rows import task_rows
from zerolora.evaluate.asked_task import ask
from zerolora.evaluate.evaluated_models import EvaluatedModel


def sentence(seed: int) -> str:
    words = ("one", "blue", "table", "goes", "under", "seven", "with", "rain", "or", "stone")
    return " ".join(random.Random(seed).choices(words, k=20))  # noqa: S311 - no secret


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_training_prompts_of_a_task_are_counted(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    """Of six rows of a task two are in training but for case, and one nearly, each with two answers."""
    task = ["Who are you?", sentence(1), *map(sentence, range(2, 6))]
    train = ["who are YOU", sentence(1).upper() + "?", f"So, {sentence(2)}, please", *map(sentence, range(20, 40))]
    rows = [{"instruction": text, "output": f"{number}"} for text in train for number in range(2)]
    for name, each in (("rows", rows), ("task", [{"instruction": text, "output": "x"} for text in task])):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/manifest.json").write_text("{}")
    settings = PrepareSettings.model_validate(
        {"model": "tiny", "path": str(tmp_path / "rows.json"), "split": {"validation": 0, "test": 0},
         "template": template}
    )  # fmt: skip
    prepare(settings, tmp_path / "model/manifest.json", tmp_path / "data", 1)
    task_rows(TaskRowsSettings(path=str(tmp_path / "task.json"), whole=False, few_shot=1), tmp_path / "exam.jsonl")
    asked = AskedTaskSettings(
        check="exact", check_settings={}, check_source=None, chat_template=template == "chat", max_new_tokens=2,
        batch=3, seed=1,
    )  # fmt: skip
    outputs = tmp_path / "m.json", tmp_path / "a.json"
    ask(asked, tmp_path / "exam.jsonl", EvaluatedModel(tmp_path / "model", None), tmp_path / "data", *outputs)
    metrics = json.loads(outputs[0].read_text())
    assert (metrics["leaked_prompts"], metrics["leaked_near_prompts"]) == (4, 2)
    assert "4 of 46 training rows have the prompt of a row of exam, and 2 nearly one" in caplog.text


def test_training_prompts_of_the_harness_are_counted(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports lm_eval: over 5 s."""
    from zerolora.evaluate.harness import ask_harness

    texts = ["The capital of France is", "the capital of ITALY is?", *map(sentence, range(8))]
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": text, "output": "x"} for text in texts]))
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/manifest.json").write_text("{}")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/harness").symlink_to(Path(__file__).parents[2] / "config/harness")
    monkeypatch.chdir(tmp_path)
    settings = PrepareSettings(
        model="tiny", path="rows.json", split=Split(validation=0, test=0), template="plain", max_length=512
    )
    prepare(settings, tmp_path / "model/manifest.json", tmp_path / "data", 1)
    asked = HarnessTaskSettings(tasks=["capitals"], batch=3, files={})
    model = EvaluatedModel(tmp_path / "model", None)
    ask_harness(asked, model, tmp_path / "data", tmp_path / "tasks/m.json", tmp_path / "tasks/a.json")
    metrics = json.loads((tmp_path / "tasks/m.json").read_text())
    assert (metrics["leaked_prompts"], metrics["capitals_rows"]) == (2, 8)
