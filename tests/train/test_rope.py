"""Rotary factors that follow the length: each row has those that it has alone, wherever a model is run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from transformers import AutoModelForCausalLM

from zerolora.config.settings import EvaluateRunSettings
from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import load
from zerolora.evaluate.generation import generate
from zerolora.evaluate.reference_log_probabilities import log_probabilities
from zerolora.evaluate.row_losses import summed_losses
from zerolora.model import rope
from zerolora.model.architecture import built_on_meta
from zerolora.train.isolation import check_length
from zerolora.train.loss import make_chunked
from zerolora.train.rope_by_row import compute_by_row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Between the lengths of the bench's rows.
THRESHOLD = 59
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "rope_theta": 1e4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": THRESHOLD,
            "rope_scaling": LONG | {"original_max_position_embeddings": THRESHOLD},
        },
    ),
    "dynamic": (
        "llama",
        {"max_position_embeddings": THRESHOLD, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with drawn weights."""
    from transformers import CONFIG_MAPPING

    family, own = KINDS[request.param]
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    folder = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tiny_model / "tokenizer_config.json", folder)
    torch.manual_seed(0)
    config: Any = CONFIG_MAPPING[family](**SIZES, **own)
    config.vocab_size = vocabulary
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8)  # attention that looks at positions
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bench(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("rope"), model)


@pytest.fixture
def loaded(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()


def by_itself(model: Path, row: dict[str, Any]) -> float:
    """Return the summed loss of a row, by transformers alone."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
    targets = torch.tensor(row["labels"][1:])
    return float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))


def test_training_is_that_of_rows_by_themselves(bench: Bench, model: Path) -> None:
    rows = list(open_split(bench.folder / "data", "train"))
    lengths = [len(row["input_ids"]) for row in rows]
    assert min(lengths) < THRESHOLD < max(lengths), lengths
    supervised = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    expected = sum(by_itself(model, row) for row in rows) / supervised
    settings = {"ranks_per_node": 1, "max_steps": 1, "global_batch": len(rows), "lora": {"r": 4, "dropout": 0.0}}
    for name, micro_batch, attention in (("padded", len(rows) // 2, "sdpa"), ("packed", 1, "flash")):
        packing = "whole" if name == "packed" else "unpacked"
        run = bench.run(
            name, "ddp", packing=packing, micro_batch=micro_batch, attention=attention,
            **(settings | ({"global_batch": 1} if packing == "whole" else {})),
        )  # fmt: skip
        assert metrics(run)["losses"] == pytest.approx([expected], rel=1e-6), name


def test_losses_and_references_are_those_of_rows_by_themselves(bench: Bench, model: Path, loaded: Any) -> None:
    rows = open_split(bench.folder / "data", "train")
    expected = [by_itself(model, row) for row in rows]
    assert compute_by_row(loaded, 64)
    assert summed_losses(loaded, rows) == pytest.approx(expected, rel=1e-5)
    together = log_probabilities(loaded, [{**row, "source": 0} for row in rows])
    assert -together == pytest.approx(expected, rel=1e-5)


def test_answers_are_those_of_prompts_by_themselves(bench: Bench, model: Path) -> None:
    """Those of transformers; two cross the threshold while they are written, two do not, one has crossed it before."""
    tokens, limit = next(iter(open_split(bench.folder / "data", "train")))["input_ids"], 12
    prompts = [(tokens * 2)[:length] for length in (10, 40, THRESHOLD - 6, THRESHOLD - 3, THRESHOLD + 4)]
    rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
    settings = EvaluateRunSettings(split="test", max_new_tokens=limit, batch=len(rows), check="sum")
    loaded, tokenizer = load(model, torch.device("cpu"), [])
    answers, _ = generate(loaded, tokenizer, rows, set(), settings, silent=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = AutoModelForCausalLM.from_pretrained(model).eval()
        inputs = torch.tensor([prompt])
        with torch.no_grad():
            written = plain.generate(inputs, do_sample=False, max_new_tokens=limit, eos_token_id=None)
        assert answer == tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True) != ""


def test_dependence_on_the_batch_is_found(loaded: Any) -> None:
    """If factors stay those of the longest row, as where a model has another kind of module."""
    device = torch.device("cpu")
    make_chunked(loaded)
    for each in (loaded, built_on_meta(loaded.config)):  # as before vLLM starts, which is refused
        assert not rope.grows(each, THRESHOLD) and rope.grows(each, THRESHOLD + 1)
    for packing in (False, True):
        with pytest.raises(UserError, match=rf"a row of 7 tokens has another loss beside one of {2 * THRESHOLD} "):
            check_length(loaded, loaded.config, device, 2 * THRESHOLD, packing)
    compute_by_row(loaded, 2 * THRESHOLD)
    for packing in (False, True):
        check_length(loaded, loaded.config, device, 2 * THRESHOLD, packing)
