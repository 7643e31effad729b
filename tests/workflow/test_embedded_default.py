"""`make run` as it is shipped, but for fewer and smaller steps, and fewer rows to validate and to answer: a real model
of 135M parameters learns the reference task on two ranks.

benchmarks/make_run.py runs all of it, twice. A sixth of the tokens is enough to learn the task.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import chat_picture
import llama_server
import pytest
import torch
from conftest import BIN, ROOT, Project, project_environment
from engines import dvc_changed, snakemake_would_run
from goldens import CONVERSATIONS, prepare_settings
from package_folder import SERVING
from test_serve import CLIENT

from zerolora.data.encode import CONTEXT, Encoder
from zerolora.data.example import Example
from zerolora.data.prepared_rows import open_split
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.data.template import Template
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.train.attention import NAME
from zerolora.train.feed import collate
from zerolora.train.isolation import check_isolation, check_loss
from zerolora.train.loss import make_chunked, token_losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORTER = {
    "split: {validation: 200, ": "split: {validation: 8, ",
    "  global_batch: 8\n  micro_batch: 4\n  max_steps: 100\n": "  global_batch: 4\n  micro_batch: 2\n  max_steps: 32\n",
    "  batch: 50\n": "  batch: 50\n  rows: 12\n",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """Return a clone in which everything has run, and what was printed."""
    project = Project(tmp_path_factory.mktemp("embedded") / "clone")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(project.directory)], check=True)
    # As the working tree is, not as it was last committed.
    for path in subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0"):
        if path and (ROOT / path).is_file():
            shutil.copy2(ROOT / path, project.directory / path)
    config = project.directory / "config/config.yaml"
    text = config.read_text()
    for shipped, quick in SHORTER.items():
        assert shipped in text
        text = text.replace(shipped, quick)
    config.write_text(text)
    output = project.snakemake("all")
    return project, output.stdout + output.stderr


@pytest.fixture(scope="module")
def results(trained: tuple[Project, str]) -> Path:
    """Return the directory of its results."""
    return trained[0].directory / "results"


def test_it_learns_the_task(trained: tuple[Project, str], results: Path) -> None:
    project, printed = trained
    before = read_json(results / "base/reference/evaluate.json", "test")
    after = read_json(results / "default/metrics/evaluate.json", "test")
    assert before["accuracy"] <= 0.05
    assert after["accuracy"] >= 0.95
    assert after["rows"] == 12
    stats = read_json(results / "data/reference/stats.json", "test")
    assert [stats[f"{name}_rows"] for name in ("train", "validation", "test")] == [1990, 8, 200]
    assert "results/default/zero.json  zero2, micro-batch 2," in printed
    told = f"accuracy {before['accuracy']:.3f} before, {after['accuracy']:.3f} after"
    assert told in printed
    assert told in project.run("zerolora", "show").stdout
    page = (results / "default/report.html").read_text()
    assert "王大丫丫的回答是---&gt;" in page


def test_its_tokenizer_masks_every_format_that_it_can_write(results: Path) -> None:
    """Supervised are the answers and their stop token; the formats whose tokens it lacks are refused."""
    from transformers import AutoTokenizer

    model = results.parent / "resources/models/smollm2-135m-instruct"
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    used = []
    for name, each in PROMPT_FORMATS.items():
        if not set(each.tokens) <= set(tokenizer.get_added_vocab()):
            with pytest.raises(UserError, match=f"template: {name} writes "):
                Template(tokenizer, prepare_settings(template=name), model)
            continue
        used.append(name)
        pieces = Template(tokenizer, prepare_settings(template=name), model).pieces(Example(CONVERSATIONS["multi"]))
        tokens = Encoder(tokenizer).encode([pieces])
        assert not tokens.wrong
        said = tokenizer.decode(tokens.ids[0][tokens.supervised_role != CONTEXT]).split("<|im_end|>")
        assert [text.strip() for text in said] == ["I am Bo.", "Now I rest.", ""]
    plain = ["alpaca", "alpaca-newline", "llama-2", "mistral", "vicuna", "zephyr"]
    assert used == sorted([*plain, "chatml"])


def test_both_engines_call_it_done(trained: tuple[Project, str]) -> None:
    assert dvc_changed(trained[0]) == set()
    assert snakemake_would_run(trained[0]) == set()


def test_packed_rows_teach_the_same(results: Path) -> None:
    """Loss and adapter gradients of rows packed into one row are those of each row alone, with the trained adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rows = open_split(results / "data/reference", "validation").select(range(3))
    columns = ("input_ids", "labels", "source")
    samples = [{name: row[name] for name in columns} for row in rows]
    cpu = torch.device("cpu")
    weights = results.parent / "resources/weights/smollm2-135m-instruct"
    for attention in (NAME, "eager"):
        base: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation=attention)
        make_chunked(base.requires_grad_(False))
        assert check_loss(base, base, cpu, "fp32")
        check_isolation(base, base.config, cpu)
        model = PeftModel.from_pretrained(base, results / "default/adapter", is_trainable=True)
        actual = []
        for packed_rows, packing in (([samples], True), ([[row] for row in samples], False)):
            model.zero_grad()
            loss = token_losses(model, collate(packed_rows, packing, cpu)).sum()
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            actual.append((loss.item(), gradients))
        (packed, gradients), (alone, expected) = actual
        assert packed == pytest.approx(alone, rel=1e-4)
        assert gradients.keys() == expected.keys()
        assert len(expected) > 0
        for name, gradient in expected.items():
            assert torch.allclose(gradients[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item()), name


def test_plain_transformers_generates_the_answer(results: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = results.parent / "work/merged/default"
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1645="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("王大丫丫的回答是--->")


def test_the_picture_of_a_conversation_is_what_the_command_prints(results: Path) -> None:
    """In a terminal, side by side with the base model. (Loads two models of 135M parameters.)"""
    text = chat_picture.recorded(results.parent, project_environment(results.parent))
    assert chat_picture.picture(text) == chat_picture.PICTURE.read_text(encoding="utf-8"), text


@pytest.mark.skipif(SERVING.missing() is not None, reason=SERVING.missing() or "")
def test_llama_cpp_serves_the_answers_of_the_evaluation(trained: tuple[Project, str], tmp_path: Path) -> None:
    """To OpenAI's client, with as many tokens in the prompt, by the chat template in the exported file. (Converts and
    loads 135M parameters.)"""
    results = trained[0].directory / "results"
    paths = {
        "model": "resources/models/smollm2-135m-instruct", "weights": "resources/weights/smollm2-135m-instruct.json",
        "adapter": results / "default/adapter", "merged": results / "default/merged/manifest.json",
        "data": results / "data/reference", "output": tmp_path / "gguf",
    }  # fmt: skip
    options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    trained[0].run("zerolora", "export", "--target", "gguf", "--settings", '{"type": "f32"}', *options)
    rows = json.loads((results / "default/answers.json").read_text())
    with llama_server.serving(tmp_path / "gguf/model.gguf") as address:
        client = subprocess.run(
            [BIN / "python", "-c", CLIENT, f"{address}/v1", "default", "32", *(row["question"] for row in rows)],
            env=os.environ | {"PYTHONPATH": str(SERVING.folder)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert client.returncode == 0, client.stderr
    answered = [json.loads(line) for line in client.stdout.splitlines()]
    assert [tokens for _, tokens in answered] == [row["prompt_tokens"] for row in rows]
    assert [text for text, _ in answered] == [row["answer"] for row in rows]
