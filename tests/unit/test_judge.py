"""MT-bench's protocol, with a local judge that counts requests."""

import email.utils
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, refusal, served
from hypothesis import given
from hypothesis import strategies as st
from loopback_judge import Judge, Messages, fair, judging

from zerolora.config.settings import JudgeSettings
from zerolora.errors import UserError
from zerolora.judge.asking import ask_all, judge_endpoint, price, tokens_of
from zerolora.judge.endpoint import ATTEMPTS
from zerolora.judge.judge import publish
from zerolora.judge.metrics import TIE, interval, metrics, outcome, rating, winner
from zerolora.judge.prompts import BASE, TUNED, JudgeQuestion, JudgeRequest, read_questions, requests
from zerolora.judge.work_file import WorkFile

QUESTIONS = [
    JudgeQuestion("1", "writing", ("Write {this}.", "Write it {0} again."), None),
    JudgeQuestion("2", "math", ("1 + 1?", "And 2 + 2?"), ("It is 2.", "It is 4.")),
]
ANSWERS = {
    BASE: {"1": ("so so", "so so"), "2": ("so so", "so so")},
    TUNED: {"1": ("a good one", "a good one"), "2": ("a {good} one", "a good one")},
}
KEY = "sk-a-secret-of-mine"


def settings_of(judge: Judge, **changed: Any) -> JudgeSettings:
    return JudgeSettings(endpoint=judge.endpoint, model="judge", **changed)


def asked(judge: Judge, work: Path, waits: list[float] | None = None, **changed: Any) -> list[dict[str, Any]]:
    settings = settings_of(judge, **changed)
    slept = [] if waits is None else waits
    with judge_endpoint(settings, {"JUDGE_KEY": KEY}, sleep=slept.append) as endpoint:
        return ask_all(requests(QUESTIONS, ANSWERS), endpoint, settings, WorkFile(work / "verdicts.jsonl"))


# Questions and prompts


def test_example_questions_cover_the_eight_categories() -> None:
    questions = read_questions(ROOT / "config/judge/questions.jsonl")
    categories = "writing roleplay extraction math reasoning coding stem humanities"
    assert [each.category for each in questions] == categories.split()
    with_reference = {each.category for each in questions if each.reference}
    assert with_reference == {"math", "reasoning", "coding"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"category": "a", "turns": ["x", "y"]}', "question_id: None is not valid"),
        ('{"question_id": 1, "category": "A b", "turns": ["x", "y"]}', "category: 'A b' is not valid"),
        ('{"question_id": 1, "category": "a", "turns": ["x"]}', "turns: ['x'] is not valid; use a list of two texts"),
        ('{"question_id": 1, "category": "a", "turns": ["x", "y"], "reference": ["z"]}', "reference: ['z'] is not"),
        ('{"question_id": 0, "category": "a", "turns": ["x", "y"]}', "question_id '0' occurs twice"),
        ('{"question_id": "\\ud800", "category": "a", "turns": ["x", "y"]}', "is not JSON"),
    ],
)
def test_invalid_question_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "questions.jsonl"
    good = '{"question_id": 0, "category": "a", "turns": ["x \u2028", "y"]}'
    file.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    refused = refusal(read_questions, file)
    assert "questions.jsonl:3: " in refused and said in refused


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="empty: has no question"):
        read_questions(tmp_path / "empty")
    with pytest.raises(UserError, match="none: there is no such file"):
        read_questions(tmp_path / "none")


def test_each_turn_is_graded_and_compared_in_both_orders() -> None:
    actual = requests(QUESTIONS, ANSWERS)
    assert [(each.question.id, each.turn, each.kind, each.role) for each in actual] == [
        (question, turn, kind, role)
        for question in "12"
        for turn in (1, 2)
        for kind, role in [("single", "base"), ("single", "tuned"), ("pair", "base_first"), ("pair", "tuned_first")]
    ]
    names = ["single-v1", "single-v1", "pair-v2", "pair-v2"]
    names += [f"{name}-multi-turn" for name in names]
    assert [each.prompt for each in actual[:8]] == names
    maths = [name.replace("single-v1", "single-math-v1").replace("pair-v2", "pair-math-v1") for name in names]
    assert [each.prompt for each in actual[8:]] == maths
    first, last = actual[3].messages[1]["content"], actual[-1].messages[1]["content"]
    assert first.index("a good one") < first.index("so so") and "Write {this}." in first
    assert last.index("It is 4.") < last.index("a {good} one") < last.index("a good one") < last.index("so so")
    assert "It is 2." not in str(actual[:8])
    assert len({each.key(model="judge") for each in actual}) == len(actual)
    assert actual[0].key(model="judge") != actual[0].key(model="other")


def test_references_are_only_shown_as_in_mt_bench() -> None:
    question = QUESTIONS[0]._replace(reference=("a reference", "another"))
    assert "reference" not in str([each.messages for each in requests([question], ANSWERS)])


# Verdicts


@given(st.integers(1, 10), st.text(alphabet=st.characters(blacklist_characters="[]")))
def test_rating_is_parsed_from_any_text(value: int, around: str) -> None:
    assert rating(f"{around}[[{value}]]{around}") == value
    assert rating(f"[[{value}]] or {around} [[{value % 10 + 1}]]") is None
    assert rating(f"{around}[{value}]{around}") is None


@pytest.mark.parametrize("text", ["", "[[11]]", "[[0]]", "[[rating]]", "[[-3]]", "[[٣]]", "5", "[[7/10]]"])
def test_invalid_rating_is_none(text: str) -> None:
    assert rating(text) is None


@given(st.sampled_from([BASE, TUNED, TIE, None]), st.sampled_from([BASE, TUNED, TIE, None]))
def test_win_needs_both_orders(one: str | None, other: str | None) -> None:
    actual = outcome(one, other)
    assert actual == outcome(other, one)
    assert (actual is None) == (one is None or other is None)
    assert (actual in (BASE, TUNED)) == (one == other and one in (BASE, TUNED))


@given(st.sampled_from("AB"))
def test_swapping_the_assistants_swaps_the_winner(letter: str) -> None:
    assert {winner(f"[[{letter}]]", order) for order in ((BASE, TUNED), (TUNED, BASE))} == {BASE, TUNED}
    assert winner("[[C]]", (BASE, TUNED)) == TIE
    assert winner("[[A]] … no, [[B]]", (BASE, TUNED)) is None is winner("A", (BASE, TUNED))


def test_the_better_model_wins_in_both_orders(tmp_path: Path) -> None:
    with judging() as judge:
        actual = metrics(asked(judge, tmp_path), 42)
    assert (actual["win_rate"], actual["tie_rate"], actual["loss_rate"]) == (1, 0, 0)
    assert (actual["score_base"], actual["score_tuned"], actual["score_difference"]) == (4, 9, 5)
    assert actual["score_tuned_turn_2"] == actual["score_tuned_category_math"] == 9
    assert actual["win_rate_category_writing"] == 1 and actual["score_difference_low"] == 5
    assert (actual["questions"], actual["requests"], actual["unparsable"]) == (2, 16, 0)
    assert (actual["prompt_tokens"], actual["completion_tokens"], actual["requests_without_usage"]) == (1600, 160, 0)


def test_position_bias_gives_ties(tmp_path: Path) -> None:
    with judging(lambda messages: "[[A]]" if "Assistant B" in messages[1]["content"] else "[[5]]") as judge:
        actual = metrics(asked(judge, tmp_path), 42)
    assert (actual["win_rate"], actual["tie_rate"], actual["loss_rate"]) == (0, 1, 0)
    assert actual["score_difference"] == 0


def test_unparsable_verdicts_are_counted_and_omitted(tmp_path: Path) -> None:
    def some(messages: Messages) -> str | None:
        text = messages[1]["content"]
        if "1 + 1" not in text:
            return fair(messages)
        return "[[B]] or [[A]]" if "2 + 2" in text else None

    with judging(some) as judge:
        records = asked(judge, tmp_path)
    actual = metrics(records, 42)
    assert (actual["unparsable"], actual["unparsable_single"], actual["unparsable_pair"]) == (8, 4, 4)
    assert actual["win_rate"] == 1 and actual["win_rate_category_math"] is None is actual["score_base_category_math"]
    nothing = metrics([{**record, "answer": ""} for record in records], 42)
    assert nothing["score_base"] is None is nothing["win_rate_low"] and nothing["unparsable"] == 16


@given(st.lists(st.lists(st.floats(1, 10), max_size=2), min_size=1, max_size=20))
def test_interval_is_within_the_values_and_seeded(values: list[list[float]]) -> None:
    by_question = {str(number): each for number, each in enumerate(values)}
    low, high = interval(by_question, 1)
    flat = [value for each in values for value in each]
    assert (low is None) == (not flat)
    if low is not None and high is not None:
        assert min(flat) - 1e-9 <= low <= high <= max(flat) + 1e-9
    assert interval(by_question, 1) == (low, high)


# The endpoint


def test_busy_endpoint_is_retried(tmp_path: Path) -> None:
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    with judging() as judge:
        judge.failures = [(503, {}), (429, {"retry-after": "7"}), "break", (500, {}), (429, {"retry-after": date})]
        waits: list[float] = []
        records = asked(judge, tmp_path, waits)
        assert len(judge.asked) == 16 + 5
        assert judge.asked[0] == judge.asked[5]
    assert waits[:4] == [1, 7, 4, 8] and 95 < waits[4] <= 100 and len(waits) == 5
    assert metrics(records, 42)["win_rate"] == 1


def test_endpoint_that_stays_busy_is_one_line(tmp_path: Path) -> None:
    waits: list[float] = []
    with judging() as judge:
        judge.failures = [(503, {})] * ATTEMPTS
        with pytest.raises(UserError, match=f"status 503 at attempt {ATTEMPTS} of {ATTEMPTS}"):
            asked(judge, tmp_path, waits)
        assert len(judge.asked) == ATTEMPTS and waits == [1, 2, 4, 8, 16, 32, 64]
        judge.failures = [(429, {"retry-after": "86400"})]
        with pytest.raises(UserError, match="asks to wait 86,400 s"):
            asked(judge, tmp_path)


@pytest.mark.parametrize(
    ("failure", "body", "said"),
    [
        (401, {"error": {"message": KEY}}, "refuses access (status 401); put a valid key"),
        (404, {"error": {"message": f"no such model, {KEY}"}}, "has no model 'judge' or no /chat/completions"),
        (400, {"error": f"bad {KEY}"}, "refuses the request (status 400, 'bad [key]')"),
        (307, None, "redirects to another address, which the key is not sent to"),
        (None, ["no completion"], "the answer is not a chat completion"),
        (None, {"choices": [{"message": {"content": 5}}]}, "the answer is not a chat completion"),
    ],
)
def test_refusal_is_one_line_without_the_key(tmp_path: Path, failure: int | None, body: Any, said: str) -> None:
    with judging() as judge, judging() as other:
        judge.failures = [(failure, {"location": f"{other.endpoint}/chat/completions"})] if failure else []
        judge.body = body
        text = refusal(asked, judge, tmp_path, key_variable="JUDGE_KEY")
        assert judge.keys == [f"Bearer {KEY}"] and other.asked == []
    assert said in text and text.startswith(f"judge.endpoint: {judge.endpoint}: ") and KEY not in text


def test_missing_server_is_one_line(tmp_path: Path) -> None:
    with judging() as judge:
        pass
    with pytest.raises(UserError, match="no connection .*refused.*; correct the address, or start the server"):
        asked(judge, tmp_path)


@pytest.mark.parametrize(
    ("changed", "environment", "said"),
    [
        ({"endpoint": None}, {}, "judge.endpoint is not set"),
        ({"model": None}, {}, "judge.model is not set"),
        ({"key_variable": "JUDGE_KEY"}, {}, "the environment variable JUDGE_KEY is not set"),
        ({"key_variable": "JUDGE_KEY"}, {"JUDGE_KEY": " \n"}, "the environment variable JUDGE_KEY is not set"),
        ({"key_variable": "JUDGE_KEY"}, {"JUDGE_KEY": "a\nb"}, "contains characters that no key has"),
    ],
)
def test_unset_or_invalid_values_are_named(changed: dict[str, Any], environment: dict[str, str], said: str) -> None:
    known = {"endpoint": "http://localhost:1", "model": "judge"}
    with pytest.raises(UserError, match=said) as error:
        judge_endpoint(JudgeSettings(**{**known, **changed}), environment)
    assert "a\nb" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://judge.example/v1",
        "ftp://localhost",
        "https://",
        "https://me:pass@judge.example",
        "https://a/v1?key=1",
        "x",
    ],
)
def test_only_encrypted_or_local_endpoints_are_valid(address: str) -> None:
    with pytest.raises(ValueError, match="(use|give) "):
        JudgeSettings(endpoint=address)
    for valid in (
        "https://judge.example/v1/",
        "http://127.0.0.1:8000/v1",
        "http://[::1]:8000/v1",
        "http://localhost/v1",
    ):
        assert JudgeSettings(endpoint=valid).endpoint == valid.rstrip("/")


def test_local_judge_bypasses_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with judging() as judge, judging() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.endpoint.removesuffix("/v1"))
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        asked(judge, tmp_path, key_variable="JUDGE_KEY")
        assert len(judge.asked) == 16 and proxy.asked == []


def test_requests_are_recorded(tmp_path: Path) -> None:
    with judging(lambda messages: f"{KEY} \ud800 {fair(messages)}") as judge:
        judge.usage = False
        records = asked(judge, tmp_path, key_variable="JUDGE_KEY", judge_tokens=77)
        bodies = judge.asked
    request = {"path": "/v1/chat/completions", "model": "judge", "temperature": 0, "max_tokens": 77}
    assert bodies[0] == {**request, "messages": records[0]["messages"]}
    assert [each["messages"] for each in bodies] == [record["messages"] for record in records]
    assert {(record["judge"], record["judge_reported"]) for record in records} == {("judge", "judge-2026-01")}
    assert records[0]["answer"] == "[key] ? Rating: [[4]]" and records[0]["finish_reason"] == "stop"
    assert metrics(records, 42)["requests_without_usage"] == 16
    assert records[0]["prompt_tokens"] == tokens_of(each["content"] for each in records[0]["messages"])


# Continuation after a kill

KILLED = """
import sys
from pathlib import Path
sys.path[:] = {path!r}
import test_judge
class There:
    endpoint = {endpoint!r}
test_judge.asked(There, Path({work!r}))
"""


def test_killed_command_continues_with_the_rest(tmp_path: Path) -> None:
    with judging() as judge:
        text = KILLED.format(path=sys.path, endpoint=judge.endpoint, work=str(tmp_path))
        process = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        judge.before = lambda number: process.send_signal(signal.SIGKILL) if number == 6 else None
        assert process.wait(60) == -signal.SIGKILL
        judge.before = lambda number: None
        file = tmp_path / "verdicts.jsonl"
        assert len(file.read_text().splitlines()) == 5
        with file.open("a") as cut:
            cut.write('{"key": "half of a li')
        records = asked(judge, tmp_path)
        assert len(judge.asked) == 6 + 11
        assert metrics(records, 42)["win_rate"] == 1 and len(WorkFile(file).pieces) == 16
        asked(judge, tmp_path)
        assert len(judge.asked) == 17
        asked(judge, tmp_path, judge_tokens=5)
        assert len(judge.asked) == 17 + 16


def test_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "verdicts.jsonl").write_text('{"key": "a"}\nnothing\n')
    with pytest.raises(UserError, match="verdicts.jsonl:2: is damaged; delete that line"):
        WorkFile(tmp_path / "verdicts.jsonl")


# The price


def test_price_follows_the_tokens(tmp_path: Path) -> None:
    prices: dict[str, Any] = {"prompt_price": 2.5, "completion_price": 10.0}
    with judging() as judge:
        settings = settings_of(judge, **prices)
        records = asked(judge, tmp_path, **prices)
    publish(settings, QUESTIONS, ANSWERS, records, tmp_path / "output")
    actual = json.loads((tmp_path / "output/judge.json").read_text())
    assert actual["price"] == pytest.approx(1600 * 2.5e-6 + 160 * 10e-6)
    assert price(1, 1, settings_of(judge, prompt_price=1.0)) is None


@given(st.text(), st.text())
def test_longer_text_has_at_least_as_many_tokens(one: str, other: str) -> None:
    assert tokens_of([one]) <= tokens_of([one + other]) <= tokens_of([one, other])


def test_no_request_is_sent_if_the_estimate_exceeds_the_price(tmp_path: Path) -> None:
    prices: dict[str, Any] = {"prompt_price": 0.0, "completion_price": 1_000_000.0, "judge_tokens": 10}
    with judging() as judge:
        with pytest.raises(UserError, match="judge.max_price: 159 is less than 160.0000"):
            asked(judge, tmp_path, max_price=159.0, **prices)
        assert judge.asked == []
        with pytest.raises(UserError, match="judge.max_price: needs prices"):
            asked(judge, tmp_path, max_price=1.0)
        assert judge.asked == []
        assert len(asked(judge, tmp_path, max_price=160.0, **prices)) == 16


def test_judging_stops_before_the_price_is_exceeded(tmp_path: Path) -> None:
    with judging() as judge:
        # 10 completion tokens each instead of 1: the second request could exceed the 16 allowed.
        with pytest.raises(UserError, match="the next request .*verdicts.jsonl"):
            asked(judge, tmp_path, max_price=16.0, prompt_price=0.0, completion_price=1e6, judge_tokens=1)
        assert len(judge.asked) == 2
        asked(judge, tmp_path, max_price=160.0, prompt_price=0.0, completion_price=1e6, judge_tokens=1)
        assert len(judge.asked) == 16


# The command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Return a directory with two models, an adapter of the first, and a data set's manifest."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("judge")
    (directory / "data").mkdir()
    data = {"files": {}, "pad_token": "<|endoftext|>", "stop_tokens": ["<|im_end|>"], "settings": {}}
    (directory / "data/manifest.json").write_text(json.dumps(data))
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False  # tied random weights repeat the last token
    for name in (TUNED, BASE):
        torch.manual_seed(len(name))
        model = LlamaForCausalLM(config)
        model.save_pretrained(directory / name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory / name)
        (directory / f"{name}.json").write_text(json.dumps({"path": str(directory / name), "files": {}}))
    (directory / "unmerged.json").write_text(json.dumps({"enabled": False, "files": {}}))
    lora = LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"], task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(str(directory / "adapter"))
    lines = [{"question_id": each.id, "category": each.category, "turns": each.turns} for each in QUESTIONS]
    (directory / "questions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


def command(models: Path, output: Path, tuned: str = TUNED, **settings: Any) -> list[str]:
    files = {"data": models / "data", "base": models / "base.json", "tuned": models / f"{tuned}.json"}
    files |= {"work": output / "work", "output": output / "judge"}
    values = {"questions": str(models / "questions.jsonl"), "max_new_tokens": 12, **settings}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    return ["zerolora", "--log", str(output / "log"), "stage", "judge", "--settings", json.dumps(values), *options]


def test_two_models_are_judged_and_the_key_stays_secret(models: Path, tmp_path: Path) -> None:
    with judging(lambda messages: f"{KEY} {fair(messages)}") as judge:
        judge.failures = [(429, {"retry-after": "0"})]
        known = {"endpoint": judge.endpoint, "model": "judge", "key_variable": "JUDGE_KEY"}
        result = served(*command(models, tmp_path, **known), JUDGE_KEY=KEY)
        assert result.returncode == 0, (tmp_path / "log").read_text()
        assert len(judge.asked) == 17 and set(judge.keys) == {f"Bearer {KEY}"}
        again = served(*command(models, tmp_path, **known), JUDGE_KEY=KEY)
        assert again.returncode == 0 and len(judge.asked) == 17
    answers = [json.loads(line) for line in (tmp_path / "judge/answers.jsonl").read_text().splitlines()]
    assert all(each[BASE] != each[TUNED] and all(each[BASE]) and all(each[TUNED]) for each in answers)
    assert [len(each["turns"]) for each in answers] == [2, 2]
    verdicts = [json.loads(line) for line in (tmp_path / "judge/verdicts.jsonl").read_text().splitlines()]
    assert [each["verdict"] for each in verdicts[:4]] == [4, 4, "tie", "tie"]
    # The second turn follows the first answer.
    second = next(each for each in verdicts if each["turn"] == 2)["messages"][1]["content"]
    assert second.index(answers[0][BASE][0]) < second.index(QUESTIONS[0].turns[1]) < second.index(answers[0][BASE][1])
    assert json.loads((tmp_path / "judge/judge.json").read_text())["tie_rate"] == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in result.stdout + result.stderr


def test_unmerged_adapter_is_judged_on_its_base(models: Path, tmp_path: Path) -> None:
    with judging() as judge:
        known = {"endpoint": judge.endpoint, "model": "judge"}
        result = served(*command(models, tmp_path, "unmerged", **known), "--adapter", str(models / "adapter"))
        without = served(*command(models, tmp_path, "unmerged", **known))
    assert (result.returncode, without.returncode) == (0, 2), (tmp_path / "log").read_text()
    assert "names no merged weights; add --adapter" in (tmp_path / "log").read_text()
    answers = [json.loads(line) for line in (tmp_path / "judge/answers.jsonl").read_text().splitlines()]
    assert all(each[BASE] != each[TUNED] for each in answers)


def test_without_an_endpoint_nothing_is_generated(models: Path, tmp_path: Path) -> None:
    result = served(*command(models, tmp_path))
    assert result.returncode == 2
    line = "zerolora: config/config.yaml: judge.endpoint is not set; set it, as docs/evaluation.md shows"
    assert (tmp_path / "log").read_text().strip() == line
    assert not (tmp_path / "judge").exists() and not (tmp_path / "work").exists()


def test_price_below_that_of_empty_answers_is_refused_first(models: Path, tmp_path: Path) -> None:
    with judging() as judge:
        prices: dict[str, Any] = {"prompt_price": 1.0, "completion_price": 1e6, "max_price": 1.0}
        result = served(*command(models, tmp_path, endpoint=judge.endpoint, model="judge", **prices))
        assert result.returncode == 2 and judge.asked == []
    assert "judge.max_price: 1 is less than" in (tmp_path / "log").read_text()
    assert not (tmp_path / "work").exists()


def test_request_key_depends_on_the_messages() -> None:
    request: JudgeRequest = requests(QUESTIONS, ANSWERS)[0]
    other = request._replace(messages=[request.messages[0], {"role": "user", "content": "other"}])
    assert request.key() != other.key()
