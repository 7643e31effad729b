"""Sampling: equal bytes however the work is divided, the distribution of the draws, prompts, and served models."""

import contextlib
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench import Bench
from conftest import begun, refusal, served
from loopback_judge import Judge, judging
from transformers import AutoModelForCausalLM

from zerolora.config.settings import PrepareSettings, SampleSettings
from zerolora.data.formats import parse
from zerolora.data.formats.reading import Reading
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import open_table
from zerolora.data.reference import records
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.generation import answer_batch
from zerolora.files import canonical, read_json, write_json
from zerolora.sample.draws import Drawn
from zerolora.sample.kept_samples import answers_in
from zerolora.sample.prompt_batches import read_prompts
from zerolora.sample.sample import sample

KEY = "sk-a-secret-of-mine"


def settings(**changed: Any) -> SampleSettings:
    values = {"of": {"base": True}, "dataset": "rows", "n": 4, "max_new_tokens": 12, "temperature": 1.0, **changed}
    return SampleSettings.model_validate(values)


@pytest.fixture(scope="module")
def case(bench: Bench, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a data set with prompts, some of them equal or near to held-out ones, and a sample of its model."""
    folder = tmp_path_factory.mktemp("sampled")
    long = "Say in one word how often the river that crosses the old town floods the fields there: {}"
    rows = records("tens", 0)[:20]
    rows += [{"instruction": long.format(word), "output": word} for word in ("daily", "rarely")]
    held_out = [
        {"instruction": long.format("sometimes"), "output": "no"},
        {"instruction": rows[0]["instruction"], "output": "no"},
    ]
    write_json(folder / "rows/train.json", [*rows, rows[1]])
    write_json(folder / "rows/test.json", held_out)
    given = bench.settings["prepare"]["rows"] | {
        "path": str(folder / "rows"),
        "split": {"validation": 0, "test": 0},
        "sources": {"train.json": {}, "test.json": {"split": "test"}},
    }
    asked = PrepareSettings.model_validate(given | {"prompts": True})
    prepare(asked, bench.folder / "m/tiny/manifest.json", folder / "data", workers=1)
    prepare(
        asked.model_copy(update={"prompts": False}), bench.folder / "m/tiny/manifest.json", folder / "other", workers=1
    )
    this = SimpleNamespace(
        folder=folder, prepared=asked, data=folder / "data", rows=rows, bench=bench, model=EvaluatedModel(tiny_model)
    )
    this.answers = sampled(this, folder / "first")
    return this


def sampled(case: SimpleNamespace, folder: Path, work: Path | None = None, **changed: Any) -> bytes:
    """Return the answers of a sample."""
    sample(settings(**changed), "own", case.data, case.model, work or folder / "work", folder / "out", {})
    return (folder / "out/answers.jsonl").read_bytes()


def test_prompts_are_distinct_ones_of_training_rows_and_no_held_out_ones(case: SimpleNamespace) -> None:
    """Nothing else of the data set depends on them."""
    rows = open_table(case.data, "prompts").to_pylist()
    assert [row["question"] for row in rows] == [row["instruction"] for row in case.rows[1:20]]
    assert [row["expected"] for row in rows] == [row["output"] for row in case.rows[1:20]]
    first = rows[0]
    conversation = json.loads(first["row"])
    assert [turn["role"] for turn in conversation["messages"]] == ["user"]
    conversation["messages"].append({"role": "assistant", "content": "another answer"})
    assert parse(conversation, "messages", Reading()).messages == conversation["messages"]
    manifests = [read_json(case.folder / name / "manifest.json", "") for name in ("data", "other")]
    assert manifests[0] == manifests[1] and "prompts.arrow" not in manifests[0]["files"]
    assert open_table(case.folder / "other", "prompts").num_rows == 0


@pytest.mark.parametrize("changed", [{"batch": 7}, {"batch": 24}, {"batch": 64}], ids=str)
def test_answers_are_the_same_bytes_in_batches_of_any_size(
    case: SimpleNamespace, tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert sampled(case, tmp_path, **changed) == case.answers
    lines = [json.loads(line) for line in case.answers.splitlines()]
    assert [(line["row"], line["sample"]) for line in lines] == [(row, n) for row in range(19) for n in range(4)]
    assert len({line["text"] for line in lines}) > 70


def test_raised_n_adds_answers_and_makes_none_again(case: SimpleNamespace, tmp_path: Path) -> None:
    """From 4 to 8, and back, against 8 that are sampled at once."""
    whole = sampled(case, tmp_path / "whole", n=8)
    assert case.answers == b"".join(line + b"\n" for line in whole.splitlines() if json.loads(line)["sample"] < 4)
    assert sampled(case, tmp_path) == case.answers
    (kept,) = (tmp_path / "work").iterdir()
    before = (kept / "rank0.jsonl").read_bytes()
    assert sampled(case, tmp_path, n=8) == whole
    added = (kept / "rank0.jsonl").read_bytes()
    assert added.startswith(before) and len(answers_in(kept)) == 19 * 8 == added.count(b"]\n")
    counts = read_json(tmp_path / "out/sample.json", "")
    assert (counts["new_answers"], counts["answers"]) == (19 * 4, 19 * 8)
    assert sampled(case, tmp_path) == case.answers and (kept / "rank0.jsonl").read_bytes().strip() == added.strip()
    assert sampled(case, tmp_path, seed=7) != case.answers
    assert not kept.exists(), "answers of other settings are not used"


def test_two_ranks_and_a_killed_sample_give_the_same_bytes(case: SimpleNamespace, tmp_path: Path) -> None:
    """By the command, on many answers, so that the kill comes between them."""
    stamp = case.bench.folder / "w/tiny.json"

    def command(folder: Path, **changed: Any) -> list[str]:
        text = canonical(settings(n=12, batch=4, **changed).model_dump(mode="json"))
        files = {"data": case.data, "base": stamp, "work": folder / "work", "output": folder / "out"}
        options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
        return [
            "zerolora",
            "stage",
            "sample",
            "own",
            "--names",
            "dataset=rows,model=tiny,run=",
            "--settings",
            text,
            *options,
        ]

    killed = begun(*command(tmp_path / "killed"))
    while not (found := list(tmp_path.glob("killed/work/*/rank0.jsonl"))) or not answers_in(found[0].parent):
        assert killed.runs(), killed.errors()
        time.sleep(0.01)
    killed.signal(signal.SIGKILL)
    killed.wait()
    assert 0 < len(answers_in(found[0].parent)) < 19 * 12
    whole = []
    for name, changed in (("killed", {}), ("ranks", {"ranks": 2})):
        result = served(*command(tmp_path / name, **changed))
        assert result.returncode == 0, result.stderr
        whole.append((tmp_path / name / "out/answers.jsonl").read_bytes())
    assert whole[0] == whole[1]
    assert [line for line in whole[0].splitlines() if json.loads(line)["sample"] < 4] == case.answers.splitlines()
    assert len(list(tmp_path.glob("ranks/work/*/rank*.jsonl"))) == 2


def test_draws_have_the_models_distribution(case: SimpleNamespace) -> None:
    """The frequencies of 3,000 draws, by a chi-squared within five deviations, and no token outside of top_p's set."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)) * 2
    keys = np.random.default_rng(0).integers(-(2**31), 2**31, (3_000, 2)).tolist()
    for temperature, top_p in ((1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (1.0, 1e-6)):
        expected = torch.softmax(logits[0].double() / temperature, -1)
        order = expected.argsort(descending=True)
        count = int((expected[order].cumsum(0) < top_p).sum()) + 1
        inside = torch.zeros_like(expected, dtype=torch.bool)
        inside[order[:count]] = True
        inner = torch.where(inside, expected, 0.0)
        wanted = (inner / inner.sum()).numpy()
        drawn = Drawn(0, temperature, top_p).raced(logits.expand(len(keys), -1), keys).argmax(-1).numpy()
        actual = np.bincount(drawn, minlength=300)
        assert actual[~inside.numpy()].sum() == 0
        often = wanted * len(keys) >= 5
        gaps = (actual[often] - wanted[often] * len(keys)) ** 2 / (wanted[often] * len(keys))
        assert gaps.sum() < often.sum() + 5 * np.sqrt(2 * often.sum()) + 1


def test_first_tokens_have_the_softmax_of_the_model(case: SimpleNamespace) -> None:
    """Through generation: 600 answers to one prompt, in batches with another one, and the greedy ones at 0."""
    model = AutoModelForCausalLM.from_pretrained(case.model.base).eval()
    one, other = (prompt.tokens for prompt in read_prompts(case.data)[:2])
    with torch.no_grad():
        logits = model(torch.tensor([one])).logits[0, -1] * 8  # a peaked distribution
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 8)
    expected = torch.softmax(logits.double(), -1).numpy()
    draw = Drawn(3, 1.0, 1.0).of([(b"1" * 32, number) for number in range(600)] + [(b"2" * 32, 0)])
    answers = answer_batch(model, 0, [one] * 600 + [other + one], set(), 1, draw=draw)
    actual = np.bincount([answer[0] for answer in answers[:600]], minlength=len(expected))
    likely = expected.argsort()[-5:]
    spread = np.sqrt(600 * expected[likely] * (1 - expected[likely]))
    assert (abs(actual[likely] - 600 * expected[likely]) < 5 * spread).all()


def test_greedy_sample_and_texts_that_stop(case: SimpleNamespace, tmp_path: Path) -> None:
    """An answer is cut at the first text of `stop`, and `ended` says whether it ended by itself."""
    greedy = [json.loads(line) for line in sampled(case, tmp_path / "0", temperature=0.0, n=1).splitlines()]
    model = AutoModelForCausalLM.from_pretrained(case.model.base).eval()
    prompt = read_prompts(case.data)[0].tokens
    assert greedy[0]["tokens"] == len(answer_batch(model, 0, [prompt], {2}, 12)[0])
    texts = [json.loads(line)["text"] for line in case.answers.splitlines()]
    letters = Counter(letter for text in texts for letter in text if letter.isascii() and letter.isalnum())
    ((stop, _),) = letters.most_common(1)
    lines = sampled(case, tmp_path / "1", stop=[stop])
    assert sampled(case, tmp_path / "2", stop=[stop], batch=1) == lines  # also the tokens, whoever else goes on
    cut = [json.loads(line) for line in lines.splitlines()]
    for line, before in zip(cut, map(json.loads, case.answers.splitlines()), strict=True):
        assert line["text"] == before["text"].partition(stop)[0]
        assert line["ended"] == (before["ended"] or stop in before["text"])
    assert any(line["text"] != text for line, text in zip(cut, texts, strict=True))


def test_what_cannot_be_sampled_is_refused_in_a_line(case: SimpleNamespace, tmp_path: Path) -> None:
    text = refusal(sampled, case, tmp_path, max_new_tokens=500)
    assert "samples.own.max_new_tokens: 500, and with the longest prompt, of" in text and "the 512 that" in text
    assert "all the same" in refusal(sampled, case, tmp_path, temperature=0.0)
    text = refusal(sampled, case, tmp_path, stop=["<|im_end|>\n"])
    assert "samples.own.stop: '<|im_end|>\\n' has the special token '<|im_end|>'" in text
    other = SimpleNamespace(**vars(case) | {"data": case.folder / "other"})
    assert "prompts.arrow: is empty" in refusal(sampled, other, tmp_path)
    assert not (tmp_path / "out").exists()


def test_small_temperatures_are_greedy_and_broken_logits_refused() -> None:
    logits = torch.tensor([[3e4, 4e4, -1.0]])
    for temperature in (1e-40, 1e-5):
        assert Drawn(0, temperature, 0.9).raced(logits, [(1, 2)]).argmax().item() == 1
    for broken in (math.nan, math.inf):
        text = refusal(Drawn(0, 1.0, 1.0).raced, logits.new_tensor([[0.0, broken, 1.0]]), [(1, 2)])
        assert "logits are not finite" in text


# Served models


@contextlib.contextmanager
def serving(**more: Any) -> Iterator[Judge]:
    """Yield a server that answers with the last message, and the body that it got."""
    with judging(lambda messages: f"answer to {messages[-1]['content']}") as server:
        for name, value in more.items():
            setattr(server, name, value)
        yield server


def served_settings(server: Judge, **changed: Any) -> SampleSettings:
    of = {"served": {"address": server.endpoint, "model": "large", "key_variable": "MODEL_KEY"}}
    return settings(of=of, **{"n": 2, "stop": ["\n"], **changed})


def asked(case: SimpleNamespace, folder: Path, wanted: SampleSettings) -> list[dict[str, Any]]:
    sample(wanted, "own", case.data, None, folder / "work", folder / "out", {"MODEL_KEY": KEY})
    return [json.loads(line) for line in (folder / "out/answers.jsonl").read_text().splitlines()]


def test_served_model_is_asked_once_for_each_answer(case: SimpleNamespace, tmp_path: Path) -> None:
    with serving() as server:
        server.failures = [(429, {"retry-after": "0"})]
        lines = asked(case, tmp_path, served_settings(server))
        assert len(lines) == 38 and len(server.asked) == 39  # one again, after the limit of its rate
        assert lines[0]["text"] == f"answer to {case.rows[1]['instruction']}" and lines[0]["tokens"] == 10
        bodies = server.asked[1:]
        assert len({body["seed"] for body in bodies}) == 38
        assert {key: bodies[0][key] for key in ("model", "temperature", "top_p", "max_tokens", "stop")} == {
            "model": "large", "temperature": 1.0, "top_p": 1.0, "max_tokens": 12, "stop": ["\n"],
        }  # fmt: skip
        assert asked(case, tmp_path, served_settings(server)) == lines and len(server.asked) == 39
        assert len(asked(case, tmp_path, served_settings(server, n=3))) == 57 and len(server.asked) == 58
        known = read_json(tmp_path / "out/manifest.json", "")["model"]
        assert known["address"] == server.endpoint and known["model"] == "large" and known["seeded"]
        assert known["reported"] == ["judge-2026-01"] and known["first_asked"] <= known["last_asked"]
        assert {*server.keys} == {f"Bearer {KEY}"}
    assert not any(KEY in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


def test_another_template_asks_no_server_again(case: SimpleNamespace, tmp_path: Path) -> None:
    """It sees messages, and no token of ours."""
    plain = SimpleNamespace(data=tmp_path / "data")
    prepared = case.prepared.model_copy(update={"template": "plain"})
    prepare(prepared, case.bench.folder / "m/tiny/manifest.json", plain.data, workers=1)
    with serving() as server:
        lines = asked(case, tmp_path, served_settings(server))
        assert asked(plain, tmp_path, served_settings(server)) == lines
        assert len(server.asked) == 38
    assert [each.tokens for each in read_prompts(plain.data)] != [each.tokens for each in read_prompts(case.data)]


def test_only_whole_answers_of_a_server_have_ended(case: SimpleNamespace, tmp_path: Path) -> None:
    reasons = ["stop", "length", "content_filter", "tool_calls", None]
    with serving() as server:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

        def next_reason(number: int) -> None:
            reason = reasons[number % len(reasons)]
            message = {"role": "assistant", "content": "half", **({"tool_calls": calls} if number % 2 else {})}
            server.body = {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}

        server.before = next_reason
        lines = asked(case, tmp_path, served_settings(server, n=5, batch=1))
    pieces = [json.loads(line) for line in (tmp_path / "work/served.jsonl").read_text().splitlines()]
    assert Counter(line["ended"] for line in lines) == Counter(each["finish_reason"] == "stop" for each in pieces)
    assert Counter(line["whole"] for line in lines) == Counter(not each["calls_tools"] for each in pieces)
    assert {each["finish_reason"] for each in pieces} == {*reasons[:-1], ""}


def test_an_answer_with_the_text_of_the_key_is_refused(case: SimpleNamespace, tmp_path: Path) -> None:
    """Cut out of the answer, it would be something that no model has said."""
    with serving() as server, pytest.raises(UserError, match=r"served.key_variable: an answer contains the text of"):
        wanted = served_settings(server)
        sample(wanted, "own", case.data, None, tmp_path / "work", tmp_path / "out", {"MODEL_KEY": "answer"})


def test_server_that_takes_no_seed_or_refuses(case: SimpleNamespace, tmp_path: Path) -> None:
    with serving(body={"error": {"message": "Unknown parameter: seed"}}) as server:
        server.failures = [(400, {})]
        server.before = lambda number: setattr(server, "body", None) if number > 1 else None
        assert len(asked(case, tmp_path, served_settings(server))) == 38
        assert "seed" in server.asked[0] and not any("seed" in body for body in server.asked[1:])
        assert not read_json(tmp_path / "out/manifest.json", "")["model"]["seeded"]
        server.failures, server.body = [(400, {})], {"error": {"message": "too long"}}
        server.before = lambda number: None
        with pytest.raises(UserError, match=r"^samples.own.of.served.address: .*refuses the request .*too long"):
            asked(case, tmp_path, served_settings(server, seed=1))
