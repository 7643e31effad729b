"""Evaluation tasks of a run: prompts from rows, likelihoods equal to lm-evaluation-harness', flat results."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, make_tiny_model, refusal
from hypothesis import given
from hypothesis import strategies as st

from zerolora import bounded
from zerolora.config.settings import AskedTaskSettings, HarnessTaskSettings, TaskRowsSettings
from zerolora.data.task_rows import task_rows
from zerolora.errors import UserError
from zerolora.evaluate import asked_task
from zerolora.evaluate.asked_task import _cut, ask
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.generation import SharedPrefix
from zerolora.evaluate.harness import ask_harness, flat
from zerolora.evaluate.intervals import bootstrap, wilson
from zerolora.export.targets.ollama import prompt_format
from zerolora.model.architecture import tokenizer_of
from zerolora.select.held_out import held_out

CAPITALS = {"prompt": "The capital of {{country}} is", "choices": "cities", "answer": "{{right}}"}
CITIES = (ROOT / "config/harness/capitals.jsonl").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/harness").symlink_to(ROOT / "config/harness")
    return tmp_path


def prompts(rows: list[dict[str, Any]], folder: Path, **settings: Any) -> list[dict[str, Any]]:
    file, output = folder / "rows.jsonl", folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task_rows(TaskRowsSettings(**{"path": str(file), "whole": False, **settings}), output)
    return [json.loads(line) for line in output.read_text().split("\n") if line]


def settings_of(check: str, **settings: Any) -> AskedTaskSettings:
    plain: dict[str, Any] = {
        "check_settings": {},
        "check_source": None,
        "chat_template": False,
        "max_new_tokens": 5,
        "batch": 3,
    }
    return AskedTaskSettings(**{**plain, "check": check, "seed": 1, **settings})


def asked(
    model: Path, folder: Path, check: str, adapter: Path | None = None, **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    evaluated, outputs = EvaluatedModel(model, adapter), (folder / "m.json", folder / "a.json")
    ask(settings_of(check, **settings), folder / "prompts.jsonl", evaluated, None, *outputs)
    return json.loads((folder / "m.json").read_text()), json.loads((folder / "a.json").read_text())


def harness(model: Path, folder: Path, *tasks: str, adapter: Path | None = None, **settings: Any) -> dict[str, Any]:
    ask_harness(
        HarnessTaskSettings(**{"tasks": list(tasks), "batch": 3, "files": {}, **settings}),
        EvaluatedModel(model, adapter), None, folder / "h.json", folder / "h.answers.json",
    )  # fmt: skip
    result: dict[str, Any] = json.loads((folder / "h.json").read_text())
    return result


# Imports lm_eval and evaluates twice: over 5 s.
@pytest.mark.parametrize("chat_template", [False, True])
def test_multiple_choice_equals_the_harness(model: Path, here: Path, chat_template: bool) -> None:
    rows = [json.loads(line) for line in CITIES.splitlines()]
    prompts(rows, here, **CAPITALS)
    metrics, answers = asked(model, here, "multiple_choice", chat_template=chat_template)
    published = harness(model, here, "capitals", chat_template=chat_template)
    held_out(here / "task-capitals.jsonl", harness=HarnessTaskSettings(tasks=["capitals"], files={}))
    assert "The capital of France is" in [*map(json.loads, (here / "task-capitals.jsonl").read_text().splitlines())]
    assert metrics["accuracy"] == published["capitals_acc"]
    assert metrics["accuracy_norm"] == published["capitals_acc_norm"]
    assert metrics["rows"] == published["capitals_rows"] == len(rows) == 8
    assert metrics["accuracy_low"] < metrics["accuracy"] < metrics["accuracy_high"]
    samples = json.loads((here / "h.answers.json").read_text())["capitals"]
    ours = [value for row in answers for value in row["answer"]]
    theirs = [float(pair[0]) for row in samples for pair in row["filtered_resps"]]
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert {"acc", "acc_norm"} <= set(samples[0])


def test_harness_evaluates_a_head_trained_beside_tied_embeddings(model: Path, here: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    head = next(value for name, value in tuned.named_parameters() if "modules_to_save" in name)
    torch.nn.init.normal_(head)
    tuned.save_pretrained(str(here / "adapter"))
    prompts([json.loads(line) for line in CITIES.splitlines()], here, **CAPITALS)
    likely = {}
    for adapter in (None, here / "adapter"):
        _, answers = asked(model, here, "multiple_choice", adapter)
        harness(model, here, "capitals", adapter=adapter)
        samples = json.loads((here / "h.answers.json").read_text())["capitals"]
        likely[adapter] = [value for row in answers for value in row["answer"]]
        theirs = [float(pair[0]) for row in samples for pair in row["filtered_resps"]]
        assert likely[adapter] == pytest.approx(theirs, abs=2e-5)
    assert likely[None] != pytest.approx(likely[here / "adapter"], abs=1)


def test_choices_have_the_same_likelihood_batched_and_alone(model: Path, here: Path) -> None:
    rows: list[dict[str, Any]] = [{"country": "France", "cities": ["Paris", "Pari", "Paries"], "right": 0}]
    prompts(rows, here, **CAPITALS)
    together: Any = asked(model, here, "multiple_choice")[1][0]["answer"]
    alone: list[Any] = []
    for city in rows[0]["cities"]:
        prompts([{**rows[0], "cities": [city, "Rome"]}], here, **CAPITALS)
        alone.append(asked(model, here, "multiple_choice", batch=1)[1][0]["answer"][0])
    assert together == pytest.approx(alone, abs=1e-5)


def test_what_all_prompts_begin_with_is_computed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihoods are those of whole rows, with continuations that are a part of each other too."""
    loaded, tokenizer, _ = asked_task.loaded(EvaluatedModel(model), None)
    solved = "The capital of Italy is Rome. The capital of Spain is Madrid. "
    asked = [(f"{solved}{question}", f" {text}", text) for question in ("a", "b c d") for text in ("e", "e f", "e g h")]
    computed: list[int] = []
    hook = loaded.register_forward_pre_hook(
        lambda _, arguments, keywords: computed.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    once = asked_task.of_continuations(loaded, tokenizer, asked, 4)
    _, _, shared, *parts = computed  # after the trial of the model's cache
    assert shared > 8 and max(parts) < shared
    computed.clear()
    monkeypatch.setattr(asked_task, "shared_prefix", lambda *_: SharedPrefix())
    whole = asked_task.of_continuations(loaded, tokenizer, asked, 4)
    hook.remove()
    assert max(computed) == shared + max(parts)
    assert [each.logarithm for each in once] == pytest.approx([each.logarithm for each in whole], abs=1e-5)


def test_perplexity_equals_the_harness_beyond_the_context_length(model: Path, here: Path) -> None:
    from transformers import AutoConfig

    longest = AutoConfig.from_pretrained(model).max_position_embeddings
    texts = ["The sum of two and three is five.", "x y " * (longest // 3)]
    (here / "config/harness").unlink()
    (here / "config/harness").mkdir()
    (here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (here / "config/harness/texts.yaml").write_text(
        "task: texts\ndataset_path: json\ndataset_kwargs: {data_files: {test: texts.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
    )
    prompts([{"text": text} for text in texts], here, whole=True)
    metrics, _ = asked(model, here, "perplexity")
    published = harness(model, here, "texts")
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert metrics[name] == pytest.approx(published[f"texts_{name}"], rel=1e-5)
    assert metrics["byte_perplexity_low"] < metrics["byte_perplexity"] < metrics["byte_perplexity_high"]


def test_settings_in_a_models_files_change_no_answer_of_the_harness(model: Path, here: Path) -> None:
    (here / "config/harness").unlink()
    (here / "config/harness").mkdir()
    (here / "sums.jsonl").write_text("".join(json.dumps({"text": f"{n} + 1 ="}) + "\n" for n in range(4)))
    (here / "config/harness/sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '1'\n"
        'generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n'
    )
    harness(model, here, "sums")
    before = (here / "h.answers.json").read_text()
    hostile = here / "hostile"
    shutil.copytree(model, hostile)
    generation = json.loads((model / "generation_config.json").read_text())
    changes = {"no_repeat_ngram_size": 1, "repetition_penalty": 5.0, "suppress_tokens": [*range(60)], "num_beams": 3}
    (hostile / "generation_config.json").write_text(json.dumps(generation | changes))
    harness(hostile, here, "sums")
    assert (here / "h.answers.json").read_text() == before
    answers = [row["filtered_resps"][0] for row in json.loads(before)["sums"]]
    assert any(len({*answer}) < len(answer) for answer in answers), "no answer repeats itself, as those settings forbid"


def test_generated_answers_are_judged_and_cut(model: Path, here: Path) -> None:
    prompts([{"instruction": f"{n}?", "input": "", "output": str(n)} for n in range(5)], here)
    metrics, whole = asked(model, here, "exact", chat_template=True, max_new_tokens=12)
    assert set(metrics) == {"rows"} | {
        f"{n}{end}" for n in ("accuracy", "format_rate") for end in ("", "_low", "_high")
    }
    assert metrics["accuracy"] == 0 and metrics["accuracy_low"] == 0 and metrics["accuracy_high"] > 0.4
    assert len(whole) == 5 and not any(row["right"] for row in whole)
    assert _cut("5\n\nQuestion: 6?", ["Question:", "\n\n"]) == "5" and _cut("5", ["\n"]) == "5"
    with pytest.raises(UserError, match=r"rows.jsonl:1: the prompt has .* tokens, and the model takes"):
        asked(model, here, "exact", max_new_tokens=10_000)


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NO_SYSTEM, "System role not supported"),
        ("{{ 1 + messages[0].content }}", "unsupported operand type"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "range"),
        ("{{ messages[0].content * 10 ** 6 }}", "writes 6,000,000 characters for one conversation"),
    ],
)
def test_failing_chat_template_is_one_line_before_the_model_loads(
    here: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    directory = make_tiny_model(here / "tiny")
    (directory / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(asked_task, "loaded", None)
    monkeypatch.setattr(bounded, "LONGEST", 1000)
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    prompts([{"messages": turns}], here)
    text = refusal(asked, directory, here, "exact", chat_template=True)
    assert "rows.jsonl:1: the chat template" in text and said in text
    assert text.endswith("; correct the row, or set chat_template: false")
    if "refuses it" in text:
        assert prompt_format(tokenizer_of(directory)) is None


def test_a_template_that_fails_in_the_harness_is_one_line(here: Path) -> None:
    directory = make_tiny_model(here / "tiny")
    (directory / "chat_template.jinja").write_text("{{ 1 + messages[0].content }}")
    line = refusal(harness, directory, here, "capitals", chat_template=True)
    assert line.startswith("the chat template refuses it: unsupported operand type")


def test_prompts_may_contain_any_line_ending(model: Path, here: Path) -> None:
    ends = "a\u2028b\u2029c\x85d\x0be\x0cf\r\ng"
    prompts([{"country": ends, "cities": ["x", "y"], "right": "x"}], here, **CAPITALS)
    _, answers = asked(model, here, "multiple_choice")
    assert [each["question"] for each in answers] == [f"The capital of {ends} is"]


def test_few_shot_examples_never_include_the_row(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "label": f"a{n}"} for n in range(6)]
    how: dict[str, Any] = {"prompt": "{{question}}:", "answer": "{{label}}", "few_shot": 3}
    actual = prompts(rows, tmp_path, **how)
    for number, row in enumerate(actual):
        *solved, own = row["prompt"].split("\n\n")
        assert own == row["question"] == f"q{number}:"
        assert len(set(solved)) == 3 and f"q{number}: a{number}" not in solved
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"] * 3 + ["user"]
    assert prompts(rows, tmp_path, **how, limit=2) == actual[:2]
    assert prompts(rows, tmp_path, **how, seed=3) != actual
    with pytest.raises(UserError, match="has 5 rows for few-shot examples; set few_shot: 5 or less"):
        prompts(rows, tmp_path, **{**how, "few_shot": 6})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt": "{{nothing}}", "answer": "x"}, "prompt: 'nothing' is undefined; correct tasks.rows.NAME.prompt"),
        ({**CAPITALS, "answer": "Bern"}, "answer: 'Bern' is none of the choices"),
        ({**CAPITALS, "choices": "country"}, "choices: is 'France'; use an expression that gives a list"),
        ({}, "its fields (country, cities, right) fit none of the formats"),
    ],
)  # fmt: skip
def test_invalid_prompt_of_a_row_is_one_line(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    row = {"country": "France", "cities": ["Lyon", "Paris"], "right": 1}
    line = refusal(prompts, [row], tmp_path, **settings)
    assert "rows.jsonl:1: " in line and said in line and not (tmp_path / "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.2 s"),
        ("{{ 'a'.center(10**10) }}", "takes more than 1 GiB for one conversation; shorten its output"),
        ("{{ country * 2000 }}", "writes 12,000 characters for one conversation; shorten its output"),
    ],
)
def test_a_prompt_is_bounded_in_time_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, said: str
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    monkeypatch.setattr(bounded, "LONGEST", 1000)
    line = refusal(prompts, [{"country": "France"}], tmp_path, prompt=prompt, answer="x")
    assert line.startswith("tasks.rows.NAME.prompt: ") and said in line


@pytest.mark.parametrize("whole", [False, True])
def test_conversation_with_tools_or_thinking_is_refused(tmp_path: Path, whole: bool) -> None:
    asks, tool = {"role": "user", "content": "Oslo?"}, {"type": "function", "function": {"name": "weather"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    said = {"role": "assistant", "content": "3"}
    for row, text, ignore in (
        ({"messages": [asks, call]}, "calls tools, which a task cannot evaluate", None),
        ({"messages": [asks, call, {"role": "tool", "content": "3"}, said]}, "calls tools", None),
        ({"messages": [asks, said], "functions": [tool]}, "has tools, which a task does not pass on", "functions"),
        ({"messages": [asks, {**said, "thinking": "T"}]}, "has thinking, which a task does not pass on", "thinking"),
    ):
        with pytest.raises(UserError, match=rf"rows.jsonl:1: {text}.*; (set prompt and answer|name their column in)"):
            prompts([row], tmp_path, whole=whole)
        if ignore:
            assert len(prompts([row], tmp_path, whole=whole, ignore=[ignore])) == 1


def test_unknown_task_or_missing_network_is_one_line(model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the index of the harness' 13,000 tasks, which takes half a minute."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path, **_: manager(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(UserError, match="lm-evaluation-harness has no such task or group.*capitals") as error:
        harness(model, here, "capitls")
    assert "\n" not in str(error.value)
    (here / "config/harness").unlink()
    (here / "config/harness").mkdir()
    (here / "config/harness/far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: a\ndoc_to_choice: [a, b]\ndoc_to_target: 0\n"
    )
    with pytest.raises(UserError, match="far: a data set is not on this machine.*set network: true") as error:
        harness(model, here, "far")
    assert "\n" not in str(error.value) and not (here / "h.json").exists()


def test_harness_results_are_flat_and_without_date() -> None:
    actual = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "exact_match,strict-match": 0.25,
                "exact_match_stderr,strict-match": 0.1,
                "exact_match,flexible-extract": 0.5,
                "exact_match_stderr,flexible-extract": "N/A",
            },
            "arc": {"acc,none": 0.5, "acc_stderr,none": 0.2, "sample_len": 4},
        },
        "n-samples": {"arc": {"original": 100, "effective": 4}},
        "date": 1.7e9,
        "git_hash": "abc",
    }
    assert flat(actual) == {
        "arc_acc": 0.5,
        "arc_acc_stderr": 0.2,
        "arc_rows": 4,
        "gsm8k_exact_match_flexible-extract": 0.5,
        "gsm8k_exact_match_strict-match": 0.25,
        "gsm8k_exact_match_strict-match_stderr": 0.1,
    }


@given(st.integers(1, 500).flatmap(lambda rows: st.tuples(st.integers(0, rows), st.just(rows))))
def test_wilson_interval_equals_scipys_and_is_symmetric(counts: tuple[int, int]) -> None:
    from scipy.stats import binomtest

    right, rows = counts
    low, high = wilson(right, rows)
    published = binomtest(right, rows).proportion_ci(method="wilson")
    assert [low, high] == pytest.approx([published.low, published.high], abs=1e-9)
    mirrored = wilson(rows - right, rows)
    assert [1 - high, 1 - low] == pytest.approx(list(mirrored), abs=1e-9)
    assert wilson(0, rows)[0] == 0 and wilson(rows, rows)[1] == 1


def test_bootstrap_is_near_the_normal_interval_and_seeded() -> None:
    values = [math.sin(n) for n in range(400)]
    low, high = bootstrap(values, lambda rows: sum(rows) / len(rows), 5)
    mean = sum(values) / 400
    half = 1.96 * math.sqrt(sum((each - mean) ** 2 for each in values)) / 400
    assert [low, high] == pytest.approx([mean - half, mean + half], abs=0.01)
    assert (low, high) == bootstrap(values, lambda rows: sum(rows) / len(rows), 5)


def test_columns_that_no_form_reads_are_undecided(tmp_path: Path) -> None:
    """A template names what it reads."""
    rows = [{"instruction": f"{n}?", "output": str(n), "verdict": f"kind {n}", "source": "a book"} for n in range(3)]
    with pytest.raises(UserError) as error:
        prompts(rows, tmp_path)
    place = tmp_path / "rows.jsonl"
    line = f"{place}:2: verdict is 'kind 1', 'kind 0' in {place}:1, and nothing reads it; map it in columns"
    assert str(error.value).startswith(line) and str(error.value).endswith("ignore: [verdict]")
    assert [row["expected"] for row in prompts(rows, tmp_path, ignore=["verdict"])] == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"rows.jsonl:2: verdict is 'kind 1', missing in .*rows.jsonl:1, and nothing"):
        prompts([{**rows[0], "verdict": ""}, *rows[1:]], tmp_path)
    assert len(prompts(rows, tmp_path, prompt="{{ instruction }}", answer="{{ output }}")) == 3
