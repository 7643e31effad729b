"""Generation: the same answers for any batch and any number of ranks, stop tokens of their own, and after a kill."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import Bench
from conftest import project_environment
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from zerolora.config.settings import EvaluateRunSettings, PrepareSettings
from zerolora.data.prepare import prepare
from zerolora.evaluate import batches as batches_module
from zerolora.evaluate import evaluate as evaluate_module
from zerolora.evaluate import ranks
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.difference import with_unmerged
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.evaluate.generation import SharedPrefix, answer_batch, cache_of, generate, shared_prefix
from zerolora.evaluate.kept import kept_in
from zerolora.files import read_json, write_json
from zerolora.memory.inference import AUTO_ROWS
from zerolora.merge.merge import merge
from zerolora.model import prompt_format

LIMIT = 24
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,  # answers that do not repeat themselves
}
"""Of a model that answers at once."""
SLOW = """
import json, sys, time
from pathlib import Path
from zerolora.config.settings import EvaluateRunSettings
from zerolora.evaluate import generation
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
own = generation.answer_batch
generation.answer_batch = lambda *arguments: time.sleep(0.3) or own(*arguments)
spec = json.loads(sys.argv[1])
model, out = EvaluatedModel(*map(Path, spec["model"])), Path(spec["out"])
settings = EvaluateRunSettings(**spec["settings"])
evaluate(settings, Path(spec["data"]), model, out, out / "answers.json", Path(spec["work"]))
"""


def settings(**values: Any) -> EvaluateRunSettings:
    return EvaluateRunSettings(**{"split": "test", "max_new_tokens": 8, "check": "sum", **values})


@pytest.fixture(scope="module")
def asked() -> tuple[Any, list[list[int]], set[int], list[list[int]]]:
    """Return a model whose answers end early and late, prompts of many lengths, stop tokens, one-by-one answers."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompts = [torch.randint(1, 60, (length,)).tolist() for length in torch.randint(1, 30, (20,)).tolist()]
    free = [answer_batch(model, 0, [prompt], set(), LIMIT)[0] for prompt in prompts]
    stops = {token for token, _ in Counter(token for answer in free for token in answer[2:]).most_common(2)}
    return model, prompts, stops, [answer_batch(model, 0, [prompt], stops, LIMIT)[0] for prompt in prompts]


@pytest.mark.parametrize("size", [3, 20])
def test_the_same_answers_in_batches_of_any_size(asked: Any, size: int) -> None:
    model, prompts, stops, alone = asked
    assert len({len(answer) for answer in alone}) > 5
    together = [
        answer
        for start in range(0, len(prompts), size)
        for answer in answer_batch(model, 0, prompts[start : start + size], stops, LIMIT)
    ]
    assert together == alone


@pytest.mark.parametrize("size", [1, 3, 20])
def test_what_all_prompts_begin_with_is_computed_once(asked: Any, size: int) -> None:
    """The answers are those of the prompts as a whole, one by one, without a cache that is made beforehand."""
    model, prompts, stops, _ = asked
    prompts = [prompts[0][:3] * 4 + prompt for prompt in prompts]
    alone = [_by_transformers(model, prompt, stops) for prompt in prompts]
    computed: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, keywords: computed.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda tokens, skip_special_tokens: tokens)
    rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
    given: list[Any] = generate(model, tokenizer, rows, stops, settings(batch=size, max_new_tokens=LIMIT))[0]
    hook.remove()
    assert given == alone
    shared = 12
    assert computed[0] == shared
    longest = max(map(len, prompts))
    assert computed[1] == min(size, len(prompts)) * (longest - shared)


def _by_transformers(model: Any, prompt: list[int], stops: set[int]) -> list[int]:
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0
    )
    return list(whole[0, len(prompt) :].tolist())


def test_windows_and_states_get_the_cache_of_transformers(asked: Any) -> None:
    """A window counts places, padding too: prompts that share more than it holds are answered as one by one."""
    torch.manual_seed(5)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    prompts = [asked[1][0][:3] * 4 + prompt for prompt in asked[1][:6]]
    assert shared_prefix(model, prompts).length == 0 and cache_of(model, SharedPrefix(), 6, 60) is None
    alone = [_by_transformers(model, prompt, asked[2]) for prompt in prompts]
    assert answer_batch(model, 0, prompts, asked[2], LIMIT) == alone


def test_left_open_all_batches_are_of_about_the_same_size(asked: Any) -> None:
    batches, left, sizes = PromptBatches(asked[0], settings(max_new_tokens=LIMIT)), 2 * AUTO_ROWS + 2, []
    while left > 0:
        sizes.append(batches.rows(30, left))
        left -= sizes[-1]
    assert len(sizes) == 3 and max(sizes) - min(sizes) <= 1


def test_ended_rows_leave_the_batch_and_no_token_is_generated_after_all_have_ended(asked: Any) -> None:
    """Fewer positions are computed than a batch of its longest answer has, and none behind that."""
    model, prompts, stops, alone = asked
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, keywords: rows.append(len(keywords["input_ids"])), with_kwargs=True
    )
    answer_batch(model, 0, prompts, stops, LIMIT)
    hook.remove()
    lengths = sorted(map(len, alone))
    assert len(rows) == lengths[-1]
    assert sum(rows) < 0.8 * len(alone) * lengths[-1]


def test_no_token_is_generated_after_all_answers_have_a_text_of_until(asked: Any) -> None:
    model, prompts, stops, alone = asked
    ending = [place for place, own in enumerate(alone) if len(own) < LIMIT]

    def decode(tokens: list[int], **_: Any) -> str:
        return "".join(chr(1000 + token) for token in tokens)

    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    tokenizer = SimpleNamespace(pad_token_id=0, decode=decode)
    rows = [{"input_ids": prompts[place], "prompt": len(prompts[place])} for place in ending]
    how = settings(batch=len(rows), max_new_tokens=LIMIT)
    answers = generate(model, tokenizer, rows, set(), how, until=[decode([stop]) for stop in stops])[0]
    hook.remove()
    assert len(passes) == max(len(alone[place]) for place in ending)
    assert all(answer.startswith(decode(alone[place])) for answer, place in zip(answers, ending, strict=True))


def test_as_many_prompts_as_fit_into_the_free_memory_share_a_batch(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = asked[0]
    sizes = []
    for free in (0, 2**20, 2**21, 2**40):
        monkeypatch.setattr(batches_module, "free_memory", lambda device, free=free: free)
        sizes.append(
            [PromptBatches(model, settings(max_new_tokens=LIMIT)).rows(length, AUTO_ROWS) for length in (30, 300)]
        )
    assert sizes[0] == [1, 1]
    assert sizes[-1] == [AUTO_ROWS, AUTO_ROWS]
    assert 1 < sizes[1][0] < sizes[2][0] < AUTO_ROWS
    assert sizes[1][1] < sizes[1][0]
    assert PromptBatches(model, settings(batch=7)).rows(300, 20) == 7


@pytest.fixture(scope="module")
def evaluated(bench: Bench, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the outputs of an evaluation on one rank, and its model."""
    run = bench.run("generated", "zero0")
    folder = tmp_path_factory.mktemp("evaluated")
    rows = bench.settings["prepare"]["rows"] | {"split": {"validation": 4, "test": 12}}
    data = folder / "data"
    source = bench.folder / "rows.json"
    prepare(PrepareSettings.model_validate(rows | {"path": str(source)}), bench.folder / "m/tiny/manifest.json", data)
    merge(tiny_model, run / "adapter", folder / "merged", folder / "merged", data)
    model = EvaluatedModel(tiny_model, run / "adapter", folder / "merged")
    evaluate(settings(), data, model, folder, folder / "answers.json")
    return SimpleNamespace(folder=folder, data=data, model=model, answers=read_json(folder / "answers.json", ""))


def test_base_and_adapter_answer_as_the_merged_model(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    """So do two ranks, and batches of other sizes."""
    both = EvaluatedModel(evaluated.model.base, evaluated.model.adapter)
    evaluate(settings(ranks=2, batch=3), evaluated.data, both, tmp_path, tmp_path / "answers.json", tmp_path / "work")
    assert read_json(tmp_path / "answers.json", "") == evaluated.answers
    first, second = (read_json(folder / "evaluate.json", "") for folder in (evaluated.folder, tmp_path))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert not (tmp_path / "work").exists()
    base = tmp_path / "base"
    evaluate(settings(), evaluated.data, EvaluatedModel(both.base), base, base / "answers.json")
    assert read_json(base / "evaluate.json", "")["loss"] > second["loss"]


def test_base_and_adapter_are_asked_beside_the_merged_model(
    evaluated: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they answer the same, and are judged alike; killed between them, the first is not asked again."""
    own, calls = ranks.answer, []

    def second_fails(folder: Path, *arguments: Any) -> None:
        calls.append(folder.parent.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        own(folder, *arguments)

    monkeypatch.setattr(evaluate_module, "answer", second_fails)
    given = settings(unmerged=True), evaluated.data, evaluated.model, tmp_path, tmp_path / "answers.json"
    with pytest.raises(KeyboardInterrupt):
        evaluate(*given, tmp_path / "work")
    evaluate(*given, tmp_path / "work")
    assert calls == ["work", "work.unmerged", "work.unmerged"]
    assert not list(tmp_path.glob("work*"))
    answers = read_json(tmp_path / "answers.json", "")
    judged = ("answer", "format", "right")
    for row, alone in zip(answers, evaluated.answers, strict=True):
        assert {name: row["unmerged"][name] for name in judged} == {name: alone[name] for name in judged}
        assert row == alone | {"unmerged": row["unmerged"]}
    figures, alone = (read_json(folder / "evaluate.json", "") for folder in (tmp_path, evaluated.folder))
    assert figures["unmerged_loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert figures["unmerged_accuracy"] == alone["accuracy"] and alone.items() <= figures.items()
    actual = with_unmerged(evaluated.answers, answers)
    assert actual["merged_over_unmerged_texts"] == 0 == actual["unmerged_over_base_texts"]


def test_a_merged_model_and_an_adapter_say_themselves_where_answers_end(
    evaluated: SimpleNamespace, tmp_path: Path
) -> None:
    """Without the stop token in their generation_config.json answers run on, though the prepared data names it."""
    for directory in (evaluated.model.merged, evaluated.model.adapter):
        config = read_json(directory / "generation_config.json", "")
        assert prompt_format.stop_tokens(directory, None) == {2}
        assert config["pad_token_id"] == 0
    file = evaluated.model.merged / "generation_config.json"
    before = file.read_text()
    stop = _token_of(evaluated)
    counted = []
    for ends in (stop, 1):  # a token that the model writes, and one that it does not
        write_json(file, json.loads(before) | {"eos_token_id": ends})
        evaluate(settings(), evaluated.data, evaluated.model, tmp_path, tmp_path / "answers.json")
        counted.append(read_json(tmp_path / "evaluate_resources.json", "")["generated_tokens"])
    file.write_text(before)
    rows = len(evaluated.answers)
    assert counted[0] < counted[1] == rows * 8


def _token_of(evaluated: SimpleNamespace) -> int:
    """Return a token of an answer that is not its last one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(evaluated.model.merged)
    return int(tokenizer(evaluated.answers[0]["answer"])["input_ids"][1])


def test_an_evaluation_that_was_killed_goes_on_from_its_answers(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    """A process of its own is killed when some rows have answers; starting it takes some seconds."""
    work = tmp_path / "work"
    model = evaluated.model
    spec = {
        "settings": settings(batch=2).model_dump(mode="json"),
        "data": str(evaluated.data),
        "model": [str(path) for path in (model.base, model.adapter, model.merged)],
        "out": str(tmp_path / "out"),
        "work": str(work),
    }
    process = subprocess.Popen([sys.executable, "-c", SLOW, json.dumps(spec)], env=project_environment(Path.cwd()))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and sum(len(kept_in(folder)) for folder in work.glob("*/")) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = work.glob("*/")
    kept = kept_in(folder)
    assert 4 <= len(kept) < len(evaluated.answers)
    with (folder / "rank0.jsonl").open("a") as file:
        file.write("[0, ")  # of a line that the kill cut off
    place = next(iter(kept))
    kept_line = json.dumps([place, "kept\u2028too", kept[place][1]], ensure_ascii=False)
    with (folder / "rank0.jsonl").open("a") as file:
        file.write(f"\n{kept_line}\n")  # shows that the row is not answered again
    evaluate(settings(batch=5), evaluated.data, model, tmp_path, tmp_path / "answers.json", work)
    expected = [each["answer"] for each in evaluated.answers]
    expected[place] = "kept\u2028too"
    assert [each["answer"] for each in read_json(tmp_path / "answers.json", "")] == expected
    assert not work.exists()
    # Of another model they are no answers.
    key_of_other = tmp_path / "work/other"
    key_of_other.mkdir(parents=True)
    (key_of_other / "rank0.jsonl").write_text(f"{kept_line}\n")
    evaluate(settings(), evaluated.data, model, tmp_path, tmp_path / "answers.json", work)
    assert read_json(tmp_path / "answers.json", "") == evaluated.answers


def test_the_model_is_found_by_transformers_alone(evaluated: SimpleNamespace) -> None:
    merged = AutoModelForCausalLM.from_pretrained(evaluated.model.merged)
    assert merged.generation_config.pad_token_id == 0
    assert merged.generation_config.eos_token_id == 2
