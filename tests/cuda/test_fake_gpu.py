"""A step of training, an evaluation and the probe of every family on a fake GPU (fake_gpu.py, rehearsal.py)."""

import itertools
import json
from pathlib import Path

import pytest
from conftest import ROOT, served
from matrix import DECODERS, FACTORS, Case, drawn, pairs, refusal, trainings, write_models

pytestmark = pytest.mark.slow
BY_VALUE = ("qwen2_5_vl",)
"""Families that generate with positions that depend on the values of tokens, which fake ones lack."""


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str | None]]:
    """Return the faults of each case, and the line that refuses it, by name."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("families")
    cases: list[Case] = [("probe", "probe", {}), ("mistakes", "checked", {})]
    for family, model in write_models(folder, tiny_model):
        if family not in BY_VALUE:
            cases.append((f"{family} evaluated", "evaluate", {"weights": str(folder / family)}))
        if family == "llama":
            get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(str(folder / "adapter"))
    cases += trainings(folder)
    llama = {"weights": str(folder / "llama")}
    (folder / "data").mkdir()
    (folder / "data/manifest.json").write_text('{"files": {}}')
    compared = llama | {"adapter": str(folder / "adapter"), "data": str(folder / "data")}
    cases += [("merged on one GPU", "compare", compared), ("merged on two GPUs", "compare", compared | {"layers": 2})]
    cases.append(("answers on two GPUs", "evaluate", llama | {"layers": 2}))
    refer = llama | {"adapter": str(folder / "adapter")}
    cases += [("reference on one GPU", "refer", refer), ("reference on two GPUs", "refer", refer | {"layers": 2})]
    cases.append(("quantized reference on two GPUs", "refer", llama | {"quantization": "nf4", "layers": 2}))
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(ROOT / "tests/cuda/rehearsal.py")
    result = served("python", script, str(folder / "cases.json"), HF_DEACTIVATE_ASYNC_LOAD="1")
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('["')]
    assert result.returncode == 0 and len(lines) == len(cases), result.stderr[-3000:]
    return {name: (faults, refused) for name, faults, refused in lines}


Found = dict[str, tuple[list[str], str | None]]


@pytest.mark.parametrize("family", DECODERS)
def test_family_trains_and_answers_on_its_device(family: str, found: Found) -> None:
    """Nothing stays on the CPU, gradients and states are beside their parameters, types are those of the plan, and no
    kernel gets what it does not take."""
    for name, (faults, refused) in found.items():
        if name.split()[0] != family:
            continue
        choice = drawn().get(name)
        said = refusal(name, choice) if choice else None
        assert not faults, f"{name} {choice}: {faults}"
        assert (said in refused) if said and refused else said == refused, f"{name} {choice}: {refused}"


def test_mistakes_are_faults(found: Found) -> None:
    assert found["mistakes"] == ([], None)


@pytest.mark.parametrize(
    "name",
    [
        "probe",
        "merged on one GPU",
        "merged on two GPUs",
        "answers on two GPUs",
        "reference on one GPU",
        "reference on two GPUs",
        "quantized reference on two GPUs",
    ],
)
def test_indices_and_tensors_are_on_one_gpu(name: str, found: Found) -> None:
    assert found[name] == ([], None)


def test_each_pair_of_values_has_a_case() -> None:
    ran = [choice for name, choice in drawn().items() if not refusal(name, choice)]
    missing = set().union(*map(pairs, itertools.product(*FACTORS.values()))).difference(*map(pairs, ran))
    assert not missing
