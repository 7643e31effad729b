"""Generation: equal answers for any batch size and number of ranks, stop tokens, continuation after a kill."""

import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import Bench
from conftest import project_environment
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    ProphetNetConfig,
    xLSTMConfig,
)

from zerolora.config.settings import EvaluateRunSettings, PrepareSettings
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED
from zerolora.evaluate import batches as batches_module
from zerolora.evaluate import evaluate as evaluate_module
from zerolora.evaluate import merged_logits, ranks
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.difference import with_unmerged
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.evaluate.generation import SharedPrefix, answer_batch, cache_of, generate, shared_prefix
from zerolora.evaluate.kept import kept_in
from zerolora.evaluate.row_losses import loss
from zerolora.export.opened import answering, model_of
from zerolora.files import read_json, write_json
from zerolora.memory.inference import AUTO_ROWS
from zerolora.merge.merge import merge
from zerolora.model import greedy, prompt_format

LIMIT = 24
SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}  # answers without repetition
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
def case() -> tuple[Any, list[list[int]], set[int], list[list[int]]]:
    """Return a model, prompts of many lengths, stop tokens that end answers early and late, and the answers."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompts = [torch.randint(1, 60, (length,)).tolist() for length in torch.randint(1, 30, (20,)).tolist()]
    free = [answer_batch(model, 0, [prompt], set(), LIMIT)[0] for prompt in prompts]
    stops = {token for token, _ in Counter(token for answer in free for token in answer[2:]).most_common(2)}
    return model, prompts, stops, [answer_batch(model, 0, [prompt], stops, LIMIT)[0] for prompt in prompts]


@pytest.mark.parametrize("size", [3, 20])
def test_answers_are_equal_in_batches_of_any_size(case: Any, size: int) -> None:
    model, prompts, stops, alone = case
    assert len({len(answer) for answer in alone}) > 5
    batches = (prompts[start : start + size] for start in range(0, len(prompts), size))
    assert [answer for batch in batches for answer in answer_batch(model, 0, batch, stops, LIMIT)] == alone


# A value of each setting that would change answers, or end in an error.
DANGEROUS: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "low_memory", "token_healing", "is_assistant", "disable_compile", "use_mtp"), True),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "early_stopping"), True),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_logits", "output_scores"), True),
    **dict.fromkeys(("use_cache", "return_dict_in_generate"), False),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 3.0),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "top_p", "min_p", "typical_p", "top_h"), 0.5),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "assistant_ensemble_weight", "max_time"), 1e-3),
    **dict.fromkeys(("assistant_confidence_threshold", "length_penalty"), -5.0),
    **dict.fromkeys(("min_new_tokens", "min_length", "num_assistant_tokens", "assistant_early_exit"), 40),
    **dict.fromkeys(("max_length", "max_new_tokens", "max_cache_len", "prefill_chunk_size", "num_beams"), 3),
    **dict.fromkeys(("num_beam_groups", "num_return_sequences", "prompt_lookup_num_tokens"), 3),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_matching_ngram_size", "top_k"), 1),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id"), 7),
    **{key: [*range(40)] for key in ("suppress_tokens", "begin_suppress_tokens", "constraints")},
    **{key: [[number] for number in range(40)] for key in ("bad_words_ids", "force_words_ids")},
    **{
        key: {"a": 1} for key in ("cache_config", "compile_config", "continuous_batching_config", "watermarking_config")
    },
    **{"sequence_bias": [[[5], 50.0]], "exponential_decay_length_penalty": [1, 9.0], "stop_strings": ["7"]},
    **{"cache_implementation": "static", "dola_layers": "low", "num_assistant_tokens_schedule": "constant"},
    **{"speculation_type": "mtp", "a_setting_of_tomorrow": 1},
}


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_setting_of_a_model_changes_an_answer(case: Any, wrapped: bool) -> None:
    """Each setting that transformers has in its own file, also where peft hands the model's on; the model keeps it."""
    from peft import LoraConfig, get_peft_model

    model, prompts, stops, alone = case
    known = {*GenerationConfig().to_dict()} - {*greedy.READ, *greedy.NO_SETTINGS}
    assert {*DANGEROUS} == known | {"a_setting_of_tomorrow"}
    before = model.generation_config
    answering = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"])) if wrapped else model
    inner: Any = answering.get_base_model() if wrapped else model
    inner.config.use_cache = False
    try:
        for name, value in DANGEROUS.items():
            inner.generation_config = theirs = GenerationConfig()
            setattr(theirs, name, value)
            assert answer_batch(answering, 0, prompts[:6], stops, LIMIT) == alone[:6], name
            assert inner.generation_config is theirs
    finally:
        model.generation_config, model.config.use_cache = before, True


@pytest.mark.parametrize("size", [1, 3, 20])
def test_shared_prefix_is_computed_once(case: Any, size: int) -> None:
    """The answers equal those of transformers, one by one, without a shared cache."""
    model, prompts, stops, _ = case
    prompts = [prompts[0][:3] * 4 + prompt for prompt in prompts]
    alone = [_by_transformers(model, prompt, stops) for prompt in prompts]
    computed: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, keywords: computed.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda tokens, skip_special_tokens: tokens)
    rows = [{"input_ids": prompt, "prompt": len(prompt)} for prompt in prompts]
    answers: list[Any] = generate(model, tokenizer, rows, stops, settings(batch=size, max_new_tokens=LIMIT))[0]
    hook.remove()
    assert answers == [_text(each, stops) for each in alone]
    shared = 12
    assert computed[0] == shared
    longest = max(map(len, prompts))
    assert computed[1] == min(size, len(prompts)) * (longest - shared)


def held_out_rows(prompts: list[list[int]]) -> Any:
    """Return rows with an answer each; in the third a token of the prompt is supervised too, the fourth has no answer
    to learn, and the last is longer than any generated one."""
    draw, result = torch.Generator().manual_seed(2), []
    for number, prompt in enumerate(prompts):
        count = 2 * LIMIT if prompt is prompts[-1] else 1 + number % 5
        answer = torch.randint(1, 60, (count,), generator=draw).tolist()
        labels = [IGNORED] * len(prompt) + answer
        labels[len(prompt) - 1] = prompt[-1] if number == 2 else IGNORED
        labels = [IGNORED] * len(labels) if number == 3 else labels
        row: dict[str, Any] = {"input_ids": prompt + answer, "labels": labels, "prompt": len(prompt)}
        result.append({**row, "length": len(labels)})
    return Dataset.from_list(result)


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("shared", [False, True])
def test_loss_of_answers_reuses_the_prompts_states(case: Any, size: int, shared: bool) -> None:
    """Each row's equals that of a forward pass of its own, for whatever batch, and the answers stay the same."""
    model, prompts, stops, alone = case
    if shared:
        prompts = [prompts[0][:3] * 4 + prompt for prompt in prompts]
        alone = [_by_transformers(model, prompt, stops) for prompt in prompts]
    rows = held_out_rows(prompts)
    kept: dict[int, Any] = {}
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda tokens, skip_special_tokens: tokens)
    how = settings(batch=size, max_new_tokens=LIMIT)
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, keywords: lengths.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    answers: list[Any] = generate(model, tokenizer, rows, stops, how, kept.update, losses=True)[0]
    hook.remove()
    assert answers == [_text(each, stops) for each in alone]
    assert lengths.count(2 * LIMIT) == 1  # the last row's answer alone
    losses = {number: answer.loss for number, answer in kept.items()}
    assert [number for number in sorted(losses) if losses[number] is None] == [2, 3]
    known = {number: value for number, value in losses.items() if value is not None}
    for number, value in known.items():
        row = rows.select([number])
        assert value / (row[0]["length"] - row[0]["prompt"]) == pytest.approx(loss(model, row), rel=1e-5)
    assert loss(model, rows, known) == pytest.approx(loss(model, rows), rel=1e-6)


def test_loss_of_a_model_with_windows_is_not_of_its_cache(case: Any) -> None:
    torch.manual_seed(5)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    kept: dict[int, Any] = {}
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda tokens, skip_special_tokens: tokens)
    how = settings(batch=3, max_new_tokens=4)
    generate(model, tokenizer, held_out_rows(case[1][:5]), set(), how, kept.update, losses=True)
    assert [answer.loss for answer in kept.values()] == [None] * 5


def _text(answer: list[int], stops: set[int]) -> list[int]:
    """Return an answer as it is decoded: without its stop token."""
    return answer[:-1] if answer[-1] in stops else answer


def _by_transformers(model: Any, prompt: list[int], stops: set[int]) -> list[int]:
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0
    )
    return list(whole[0, len(prompt) :].tolist())


def test_sliding_windows_use_transformers_cache(case: Any) -> None:
    """A window counts padding, so prompts that share more than a window get transformers' cache."""
    torch.manual_seed(5)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    prompts = [case[1][0][:3] * 4 + prompt for prompt in case[1][:6]]
    assert shared_prefix(model, prompts).length == 0 and cache_of(model, SharedPrefix(), 6, 60) is None
    alone = [_by_transformers(model, prompt, case[2]) for prompt in prompts]
    assert answer_batch(model, 0, prompts, case[2], LIMIT) == alone


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        (OpenAIGPTConfig(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=80), True),  # ignores the cache
        (xLSTMConfig(vocab_size=60, hidden_size=32, num_blocks=1, num_heads=4, bos_token_id=1), False),  # fails with it
    ],
    ids=["openai-gpt", "xlstm"],
)
def test_a_class_that_computes_with_no_cache_answers_without(case: Any, config: Any, caches: bool) -> None:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.tensor([case[1][0][:5]])
    if not caches:
        with pytest.raises((RuntimeError, ValueError)):
            model(input_ids=tokens, use_cache=True)
    assert cache_of(model, SharedPrefix(), 1, 60) is None
    answer = answer_batch(model, 0, tokens.tolist(), set(), 4)[0]
    for _ in range(4):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert answer == tokens[0, 5:].tolist()


def test_a_class_that_makes_all_logits_has_the_loss_of_its_last(case: Any) -> None:
    """ProphetNet's ignores `logits_to_keep`."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"num_decoder_layers": 1, "decoder_ffn_dim": 16, "num_decoder_attention_heads": 2}
    config = ProphetNetConfig(vocab_size=60, hidden_size=16, is_decoder=True, add_cross_attention=False, **sizes)
    model, rows = AutoModelForCausalLM.from_config(config).eval(), held_out_rows(case[1][:4])
    whole, chances = [], []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1].log_softmax(-1)
        labels = torch.tensor(row["labels"][1:])
        whole.append(torch.nn.functional.nll_loss(logits, labels, ignore_index=IGNORED, reduction="sum").item())
        chances.append(logits[labels != IGNORED][: merged_logits.TOKENS])
    count = sum(label != IGNORED for labels in rows["labels"] for label in labels[1:])
    assert loss(model, rows) == pytest.approx(sum(whole) / count, rel=1e-5)
    torch.testing.assert_close(merged_logits.next_tokens(model, rows), torch.cat(chances), rtol=1e-5, atol=1e-5)


def test_automatic_batches_have_about_equal_sizes(case: Any) -> None:
    batches, left, sizes = PromptBatches(case[0], settings(max_new_tokens=LIMIT)), 2 * AUTO_ROWS + 2, []
    while left > 0:
        sizes.append(batches.rows(30, left))
        left -= sizes[-1]
    assert len(sizes) == 3 and max(sizes) - min(sizes) <= 1


def test_ended_rows_leave_the_batch(case: Any) -> None:
    model, prompts, stops, alone = case
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, keywords: rows.append(len(keywords["input_ids"])), with_kwargs=True
    )
    answer_batch(model, 0, prompts, stops, LIMIT)
    hook.remove()
    lengths = sorted(map(len, alone))
    assert len(rows) == lengths[-1]
    assert sum(rows) < 0.8 * len(alone) * lengths[-1]


def test_generation_ends_when_all_answers_contain_an_until_text(case: Any) -> None:
    model, prompts, stops, alone = case
    ending = [index for index, own in enumerate(alone) if len(own) < LIMIT]

    def decode(tokens: list[int], **_: Any) -> str:
        return "".join(chr(1000 + token) for token in tokens)

    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    tokenizer = SimpleNamespace(pad_token_id=0, decode=decode, all_special_ids=[])
    rows = [{"input_ids": prompts[index], "prompt": len(prompts[index])} for index in ending]
    how = settings(batch=len(rows), max_new_tokens=LIMIT)
    answers = generate(model, tokenizer, rows, set(), how, until=[decode([stop]) for stop in stops])[0]
    hook.remove()
    assert len(passes) == max(len(alone[index]) for index in ending)
    assert all(answer.startswith(decode(alone[index])) for answer, index in zip(answers, ending, strict=True))


def test_batch_size_follows_free_memory(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case[0]
    sizes = []
    for free in (0, 2**20, 2**21, 2**40):
        monkeypatch.setattr(batches_module, "free_memory", lambda device, free=free: free)
        batches = PromptBatches(model, settings(max_new_tokens=LIMIT))
        sizes.append([batches.rows(length, AUTO_ROWS) for length in (30, 300)])
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


def test_base_and_adapter_answer_like_the_merged_model(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    """Also on two ranks, with another batch size."""
    both = EvaluatedModel(evaluated.model.base, evaluated.model.adapter)
    evaluate(settings(ranks=2, batch=3), evaluated.data, both, tmp_path, tmp_path / "answers.json", tmp_path / "work")
    assert read_json(tmp_path / "answers.json", "") == evaluated.answers
    first, second = (read_json(folder / "evaluate.json", "") for folder in (evaluated.folder, tmp_path))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert not (tmp_path / "work").exists()
    base = tmp_path / "base"
    evaluate(settings(), evaluated.data, EvaluatedModel(both.base), base, base / "answers.json")
    assert read_json(base / "evaluate.json", "")["loss"] > second["loss"]


def noting(load: Callable[..., Any], loads: list[Path]) -> Callable[..., Any]:
    """Return a function that notes the directories of models that it loads."""

    def call(weights: Path, *others: Any, **named: Any) -> Any:
        loads.append(weights)
        return load(weights, *others, **named)

    return call


def test_unmerged_model_is_evaluated_beside_the_merged_one(
    evaluated: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the same answers here; after a kill between them the first is not repeated. Base and adapter are loaded
    once, for the comparison of logits and for their answers."""
    own, calls = ranks.answer, []
    loads: list[Path] = []
    for module in (ranks, merged_logits):
        monkeypatch.setattr(module, "load", noting(module.load, loads))

    def second_fails(folder: Path, *rest: Any) -> None:
        calls.append(folder.parent.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        own(folder, *rest)

    monkeypatch.setattr(evaluate_module, "answer", second_fails)
    arguments = settings(unmerged=True), evaluated.data, evaluated.model, tmp_path, tmp_path / "answers.json"
    with pytest.raises(KeyboardInterrupt):
        evaluate(*arguments, tmp_path / "work")
    loads.clear()
    evaluate(*arguments, tmp_path / "work")
    assert loads == [evaluated.model.merged, evaluated.model.base]
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


def test_stop_tokens_come_from_generation_config(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    for directory in (evaluated.model.merged, evaluated.model.adapter):
        config = read_json(directory / "generation_config.json", "")
        assert prompt_format.stop_tokens(directory, None) == {2}
        assert config["pad_token_id"] == 0
    file = evaluated.model.merged / "generation_config.json"
    before = file.read_text()
    stop = _token_of(evaluated)
    counted = []
    for ends in (stop, 1):  # one that the model generates, one that it does not
        write_json(file, json.loads(before) | {"eos_token_id": ends})
        evaluate(settings(), evaluated.data, evaluated.model, tmp_path, tmp_path / "answers.json")
        resources = read_json(tmp_path / "evaluate_resources.json", "")
        counted.append(resources["generated_tokens"])
        rate = resources["generated_tokens"] / resources["answering_seconds"]
        assert rate == pytest.approx(resources["generated_tokens_per_second"]) and rate > 0
    file.write_text(before)
    rows = len(evaluated.answers)
    assert counted[0] < counted[1] == rows * 8


def test_settings_in_a_models_files_change_no_answer(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    """Of the evaluation, and of an export that is opened; test_asked_tasks.py has tasks of the harness."""
    model = tmp_path / "model"
    shutil.copytree(evaluated.model.merged, model)
    before = generated(evaluated, model, tmp_path / "before")
    hostile = {"no_repeat_ngram_size": 1, "min_new_tokens": 20, "guidance_scale": 3.0, "stop_strings": ["7"]}
    generation = read_json(model / "generation_config.json", "") | hostile | {"use_cache": False, "do_sample": True}
    write_json(model / "generation_config.json", generation)
    write_json(model / "config.json", read_json(model / "config.json", "") | {"use_cache": False})
    after = generated(evaluated, model, tmp_path / "after")
    assert after == before
    assert read_json(model / "generation_config.json", "") == generation


def generated(evaluated: SimpleNamespace, model: Path, folder: Path) -> list[Any]:
    """Return what a merged model answers."""
    from transformers import AutoTokenizer

    tuned = EvaluatedModel(evaluated.model.base, evaluated.model.adapter, model)
    evaluate(settings(), evaluated.data, tuned, folder, folder / "answers.json")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = tokenizer([row["question"] for row in evaluated.answers[:3]])["input_ids"]
    answers = answering(model_of(model), "transformers").answers
    opened = answers(prompts, 8, [2]) if answers else None
    return [read_json(folder / "answers.json", ""), opened]


def _token_of(evaluated: SimpleNamespace) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(evaluated.model.merged)
    return int(tokenizer(evaluated.answers[0]["answer"])["input_ids"][1])


def test_killed_evaluation_continues_from_its_answers(evaluated: SimpleNamespace, tmp_path: Path) -> None:
    work = tmp_path / "work"
    model = evaluated.model
    spec = {"settings": settings(batch=2).model_dump(mode="json"), "data": str(evaluated.data), "work": str(work)}
    paths = [str(path) for path in (model.base, model.adapter, model.merged)]
    spec |= {"model": paths, "out": str(tmp_path / "out")}
    process = subprocess.Popen([sys.executable, "-c", SLOW, json.dumps(spec)], env=project_environment(Path.cwd()))
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and sum(len(kept_in(folder)) for folder in work.glob("*/")) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = work.glob("*/")
    stored = kept_in(folder)
    assert 4 <= len(stored) < len(evaluated.answers)
    with (folder / "rank0.jsonl").open("a") as file:
        index = next(iter(stored))
        line = json.dumps([index, "stored\u2028answer", stored[index][1]], ensure_ascii=False)
        file.write(f"[0, \n{line}\n")  # a truncated line, and one that shows that the row is not answered again
    evaluate(settings(batch=5), evaluated.data, model, tmp_path, tmp_path / "answers.json", work)
    expected = [each["answer"] for each in evaluated.answers]
    expected[index] = "stored\u2028answer"
    assert [each["answer"] for each in read_json(tmp_path / "answers.json", "")] == expected
    assert "answering_seconds" not in read_json(tmp_path / "evaluate_resources.json", ""), "of a part of the rows"
    assert not work.exists()
    # Answers of another model are ignored.
    other = tmp_path / "work/other"
    other.mkdir(parents=True)
    (other / "rank0.jsonl").write_text(f"{line}\n")
    evaluate(settings(), evaluated.data, model, tmp_path, tmp_path / "answers.json", work)
    assert read_json(tmp_path / "answers.json", "") == evaluated.answers


def test_merged_model_loads_in_transformers(evaluated: SimpleNamespace) -> None:
    merged = AutoModelForCausalLM.from_pretrained(evaluated.model.merged)
    assert merged.generation_config.pad_token_id == 0
    assert merged.generation_config.eos_token_id == 2
