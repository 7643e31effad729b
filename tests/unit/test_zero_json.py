"""zero.json reads back, and a file that `render` does not write is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_plan import training_plan

from zerolora.config.settings import Canary, TrainingChoice
from zerolora.errors import UserError
from zerolora.planner.zero_json import ZeroJson

OPTIONS = {
    "gradient_clipping": 1.0,
    "fsdp": {
        "mesh": [2],
        "reshard_after_forward": True,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "offload": False,
    },
}


def choice(**changed: Any) -> TrainingChoice:
    plan = training_plan(engine="fsdp", strategy="fsdp")
    return TrainingChoice(**{**{name: getattr(plan, name) for name in TrainingChoice.model_fields}, **changed})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "zero.json"
    ZeroJson(options=OPTIONS, choice=choice()).write(file)
    return file


def test_zero_json_reads_back(tmp_path: Path) -> None:
    """With values that only DeepSpeed reads, and a canary."""
    options = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8}, "aio": {}}
    safe = ZeroJson(options=OPTIONS, choice=choice()).as_json()
    written = ZeroJson(options=options, choice=choice(canary=Canary(steps=5, reasons=["new"], zero=safe)))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    written.write(first)
    actual = ZeroJson.read(first)
    actual.write(second)
    assert actual == written and first.read_bytes() == second.read_bytes()
    assert actual.engine.zero_optimization.stage == 2 and actual.engine.fsdp is None
    assert actual.choice.canary and ZeroJson.of(actual.choice.canary.zero).as_json() == safe
    assert "canary" not in safe["zerolora"]  # omitted at its neutral value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.pop("zerolora"), "zerolora is missing"),
        (lambda file: file.update(zerolora=3), "zerolora is 3, which `zerolora stage render` does not write"),
        (lambda file: file["zerolora"].pop("engine"), "zerolora.engine is missing"),
        (lambda file: file["zerolora"].update(micro_batch="2"), "zerolora.micro_batch is '2', which"),
        (lambda file: file["zerolora"].update(spare=1), "zerolora.spare is 1, which"),
        (lambda file: file.pop("gradient_clipping"), "gradient_clipping is missing"),
        (lambda file: file["fsdp"].update(mesh=2), "fsdp.mesh is 2, which"),
        (lambda file: file.update(zero_optimization={"stage": "x"}), "zero_optimization.stage is 'x', which"),
    ],
)
def test_other_file_is_refused_in_one_line(path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        ZeroJson.read(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    assert str(refused.value).endswith("; run `zerolora stage render` again") and "\n" not in str(refused.value)
