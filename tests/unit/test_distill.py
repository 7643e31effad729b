"""Distillation on its own: the divergence and its gradient against autograd in fp64, a teacher's stored values, and
what is refused of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from bench import Bench
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from zerolora.config.settings import TeacherSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import IGNORED, open_split, open_table
from zerolora.data.row_columns import RowColumns
from zerolora.errors import UserError
from zerolora.evaluate import frozen_model, teacher_probabilities
from zerolora.files import MANIFEST, describe, sha256, write_json
from zerolora.model.manifest import located
from zerolora.train.feed import collate, packed_row
from zerolora.train.head_loss import CROSS_ENTROPY
from zerolora.train.loss import ChunkedLoss, TrainedHeadLoss, make_chunked, of_logits, token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.distill import IDS, LABEL, LOG_PROBABILITIES, REST
from zerolora.train.objectives.objective import OF_TOKENS
from zerolora.train.sequence_parallel import sequence
from zerolora.train.teacher_columns import with_teacher
from zerolora.train.top_k import LEAST_LOG, Divergence, TopK

TOKENS, HIDDEN, VOCABULARY = 600, 16, 53  # of which a chunk has 256 tokens
ALL = slice(None)


def stored(logits: torch.Tensor, targets: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Return what the stage stores of a teacher's logits: ids, log-probabilities in fp16, rest, label."""
    values = TopK(k, temperature, logits.shape[1])(logits.clone(), targets, ALL, False)
    return values[:k].T.int(), values[k : 2 * k].T.half(), values[-2], values[-1]


def divergence(teacher: tuple[torch.Tensor, ...], temperature: float, alpha: float) -> Divergence:
    ids, known, rest, _ = teacher
    return Divergence(ids, known, rest, temperature, alpha)


def expected(
    logits: torch.Tensor, targets: torch.Tensor, teacher: tuple[torch.Tensor, ...], temperature: float, alpha: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, cross-entropy and divergence of each token as autograd computes them, in fp64."""
    ids, known, rest, _ = teacher
    target = torch.cat([known.double(), rest.double().unsqueeze(1)], 1).log_softmax(1)
    student = (logits / temperature).softmax(1)
    top = student.gather(1, ids.long())
    others = student.scatter(1, ids.long(), 0.0).sum(1, keepdim=True)
    bins = torch.cat([top, others], 1).log()
    kl = torch.where(target > -100, target.exp() * (target - bins), 0.0).sum(1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return alpha * cross_entropy + (1 - alpha) * temperature**2 * kl, cross_entropy, kl


def drawn(seed: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    """Return hidden states, a head's weight and bias, targets, and a teacher's logits."""
    draw = torch.Generator().manual_seed(seed)
    return (
        scale * torch.randn(TOKENS, HIDDEN, generator=draw),
        torch.randn(VOCABULARY, HIDDEN, generator=draw),
        torch.randn(VOCABULARY, generator=draw),
        torch.randint(VOCABULARY, (TOKENS,), generator=draw),
        scale * torch.randn(TOKENS, VOCABULARY, generator=draw),
    )


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("temperature", "alpha", "k"), [(1.0, 0.5, 8), (2.5, 0.2, 8), (1.0, 0.0, VOCABULARY)])
def test_values_and_gradients_are_those_of_autograd_in_fp64(
    temperature: float, alpha: float, k: int, softcap: float | None, trained: bool
) -> None:
    """Chunk by chunk, with the weights that the loop gives each token's loss."""
    hidden, weight, bias, targets, of_teacher = drawn(0)
    teacher = stored(of_teacher, targets, k, temperature)
    each = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    doubles = [value.double().requires_grad_() for value in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*doubles)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    wanted = expected(logits, targets, teacher, temperature, alpha)
    (wanted[0] * each).sum().backward()
    own = [hidden.requires_grad_(), weight.requires_grad_(trained), bias.requires_grad_(trained)]
    kind: Any = TrainedHeadLoss if trained else ChunkedLoss
    values = kind.apply(*own, targets, softcap, divergence(teacher, temperature, alpha))
    (values[0] * each).sum().backward()
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.double(), other.detach(), rtol=2e-5, atol=2e-5)
    for value, other in zip(own, doubles, strict=True):
        if value.requires_grad:
            assert value.grad is not None and other.grad is not None
            error = (value.grad.double() - other.grad).norm() / other.grad.norm()
            assert error < 4e-6


def test_the_whole_vocabulary_gives_the_full_divergence() -> None:
    """But for the rounding of log-probabilities to fp16. A teacher that is the student has none."""
    hidden, weight, bias, targets, of_teacher = drawn(2)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    teacher = stored(of_teacher, targets, VOCABULARY, 1.0)
    _, cross_entropy, kl = of_logits(logits, targets, divergence(teacher, 1.0, 0.5))
    log_target, log_input = of_teacher.double().log_softmax(1), logits.double().log_softmax(1)
    full = torch.nn.functional.kl_div(log_input, log_target, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl.double(), full, rtol=1e-3, atol=2e-3)
    assert abs(float(kl.double().mean() / full.mean()) - 1) < 1e-4
    torch.testing.assert_close(cross_entropy, of_logits(logits, targets, CROSS_ENTROPY)[0])
    torch.testing.assert_close(-teacher[3], torch.nn.functional.cross_entropy(of_teacher, targets, reduction="none"))
    for temperature, k in ((1.0, VOCABULARY), (1.0, 8), (3.0, 8)):
        same = divergence(stored(logits, targets, k, temperature), temperature, 0.0)
        _, _, none = of_logits(logits, targets, same)
        assert none.abs().max() < 2e-6


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("gap", [80.0, 120.0, 600.0])
def test_the_rest_has_its_gradient_however_far_the_student_has_it_below(gap: float, temperature: float) -> None:
    draw = torch.Generator().manual_seed(3)
    of_teacher, logits = torch.randn(2, 40, VOCABULARY, generator=draw)
    targets = torch.randint(VOCABULARY, (40,), generator=draw)
    teacher = stored(of_teacher, targets, 8, temperature)
    logits.scatter_add_(1, teacher[0].long(), torch.full((40, 8), gap))
    both = logits.double().requires_grad_(), logits.requires_grad_()
    wanted = expected(both[0], targets, teacher, temperature, 0.5)
    wanted[0].sum().backward()
    values = of_logits(both[1], targets, divergence(teacher, temperature, 0.5))
    values[0].sum().backward()
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.double(), other.detach(), rtol=1e-5, atol=1e-5)
    assert both[0].grad is not None and both[1].grad is not None
    torch.testing.assert_close(both[1].grad.double(), both[0].grad, rtol=1e-4, atol=1e-6)


@given(seed=st.integers(0, 1000), k=st.integers(1, VOCABULARY), scale=st.sampled_from([0.1, 3.0, 40.0, 300.0]))
def test_it_is_finite_and_never_negative(seed: int, k: int, scale: float) -> None:
    """Also where the student, or the teacher, gives almost all of the mass to one token."""
    hidden, weight, bias, targets, of_teacher = drawn(seed, scale)
    logits = torch.nn.functional.linear(hidden, weight, bias)[:40].requires_grad_()
    teacher = stored(of_teacher[:40], targets[:40], k, 1.0)
    values = of_logits(logits, targets[:40], divergence(teacher, 1.0, 0.5))
    values[0].sum().backward()
    assert values.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert values[2].min() > -1e-5


def test_rows_are_read_as_views_of_every_part_of_a_column() -> None:
    """Of lists with 32- and 64-bit offsets, and of numbers."""
    draw = np.random.default_rng(0)
    lists = [draw.integers(0, 9, int(length)).tolist() for length in draw.integers(0, 6, 23)]
    for kind in (pyarrow.list_(pyarrow.int32()), pyarrow.large_list(pyarrow.int32())):
        column = pyarrow.array(lists, kind)
        parts = pyarrow.chunked_array([column.slice(0, 9), column.slice(9, 1), column.slice(10)])
        rows = Dataset(pyarrow.table({"tokens": parts, "number": pyarrow.array(range(23))}), fingerprint=str(kind))
        order = draw.permutation(23).tolist()
        read = list(RowColumns(rows).rows(order, ("tokens", "number")))
        assert [(row["tokens"].tolist(), row["number"]) for row in read] == [(lists[each], each) for each in order]
        assert not read[0]["tokens"].flags.owndata


# The stage and its columns.

CPU = torch.device("cpu")
DISTILL = OBJECTIVES["distill"].configured({"top_k": 8})


@pytest.fixture(scope="module")
def taught(bench: Bench) -> Any:
    """Return the training rows with the values of another model, by the stage."""
    folder = bench.teach(top_k=8)
    return with_teacher(open_split(bench.folder / "data", "train"), bench.folder / "data", folder, "train", DISTILL)


def test_the_stage_stores_the_teachers_distribution_of_each_supervised_token(bench: Bench, taught: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(located(bench.folder / "w/other.json"), dtype=torch.float32)
    names = ("input_ids", "labels", IDS, LOG_PROBABILITIES, REST, LABEL)
    for row in RowColumns(taught).rows(range(len(taught)), names):
        with torch.no_grad():
            logits = model(torch.tensor(row["input_ids"][None].astype(np.int64))).logits[0].log_softmax(1)
        places = np.flatnonzero(row["labels"][1:] != IGNORED)
        values, ids = logits[places].topk(8)
        assert row[IDS].reshape(-1, 8).tolist() == ids.tolist()
        np.testing.assert_allclose(row[LOG_PROBABILITIES].reshape(-1, 8), values, rtol=1e-3)
        np.testing.assert_allclose(row[REST], (1 - values.exp().sum(1)).log(), rtol=1e-4)
        np.testing.assert_allclose(row[LABEL], logits[places, row["labels"][1:][places]], rtol=1e-4)
    stats = json.loads((bench.folder / "teacher/stats.json").read_text())
    labels = np.concatenate([row[LABEL] for row in RowColumns(taught).rows(range(len(taught)), (LABEL,))])
    assert stats["train_loss"] == pytest.approx(-labels.mean(), rel=1e-6)
    size = (bench.folder / "teacher/train.arrow").stat().st_size
    assert DISTILL.row_bytes(stats["train_supervised_tokens"]) == pytest.approx(size, rel=0.2)


def test_losses_are_equal_over_packing_micro_batches_and_shared_prefixes(bench: Bench, taught: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(located(bench.folder / "w/tiny.json"), dtype=torch.float32)
    make_chunked(model)
    results = []
    for packing, packed, together in (("unpacked", False, 1), ("unpacked", False, 5), ("packed", True, 2)):
        plan = open_plan(bench.folder / packing / "train.arrow")
        of_rows: dict[int, torch.Tensor] = {}
        for first in range(0, len(plan.starts) - 1, together):
            numbers = range(first, min(first + together, len(plan.starts) - 1))
            batch = collate([packed_row(taught, plan, number, DISTILL) for number in numbers], packed, CPU)
            with torch.no_grad():
                losses = token_losses(model, batch, DISTILL.head_loss(batch))
            values = DISTILL.values(losses, batch, {})
            table = torch.stack([each.each for each in values.values()])
            members = plan.members[plan.starts[numbers[0]] : plan.starts[numbers[-1] + 1]].tolist()
            of_rows |= {row: table[:, batch["sequence"] == place] for place, row in enumerate(members)}
        results.append(torch.cat([of_rows[row] for row in sorted(of_rows)], 1))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-5)
    twice = open_plan(bench.folder / "unpacked/train.arrow")
    rows = [packed_row(taught, twice, number, DISTILL) for number in (0, 1, 0)]
    whole, joined = (collate(rows, True, CPU, prefixes) for prefixes in (False, True))
    assert torch.equal(whole[OF_TOKENS][IDS], joined[OF_TOKENS][IDS]) and "branches" in joined


def test_ranks_that_share_rows_get_the_values_of_their_own_tokens(
    bench: Bench, taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = open_plan(bench.folder / "packed/train.arrow")
    rows = [packed_row(taught, plan, number, DISTILL) for number in range(3)]
    whole, by_token = collate(rows, True, CPU), {}
    monkeypatch.setattr(sequence, "size", 2)
    for rank in (0, 1):
        monkeypatch.setattr(sequence, "rank", rank)
        batch = collate(rows, True, CPU)
        width, longest = batch["input_ids"].shape[1], whole["input_ids"].shape[1]
        for at, label in zip(batch["supervised"].tolist(), batch[OF_TOKENS][LABEL].tolist(), strict=True):
            row, place = divmod(at, width)
            by_token[row * longest + rank * width + place] = label
    assert longest % 2 == 0
    expected = dict(zip(whole["supervised"].tolist(), whole[OF_TOKENS][LABEL].tolist(), strict=True))
    assert by_token == expected


def test_another_vocabulary_is_refused_before_the_teacher_is_loaded(bench: Bench, tmp_path: Path) -> None:
    weights = located(bench.folder / "w/tiny.json")
    other = shutil.copytree(weights, tmp_path / "other", copy_function=shutil.copy)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    one, two = [name for name, number in vocabulary.items() if number in (200, 201)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    (other / "model.safetensors").write_bytes(b"")  # which would end with another error
    write_json(tmp_path / "other.json", {"path": str(other), "files": {}})
    settings = TeacherSettings(model="large", device="cpu", precision="fp32")
    folders = bench.folder / "data", bench.folder / "m/tiny", tmp_path / "other.json", tmp_path / "teacher"
    with pytest.raises(UserError, match=r"^the teacher large has another vocabulary .*: 2 tokens, as .* \(samples\)$"):
        teacher_probabilities.compute(settings, *folders)
    assert not (tmp_path / "teacher").exists()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_position_embeddings", 16, r"^the teacher large takes rows of 16 tokens, and a prepared one has \d+; set"),
        ("vocab_size", 40, r"^the teacher large has 40 tokens in its head, and a prepared row has number \d+; use"),
    ],
)
def test_a_teacher_that_cannot_take_the_rows_is_refused_before_it_is_loaded(
    bench: Bench, tmp_path: Path, key: str, value: int, said: str
) -> None:
    other = shutil.copytree(located(bench.folder / "w/tiny.json"), tmp_path / "other", copy_function=shutil.copy)
    config = json.loads((other / "config.json").read_text())
    write_json(other / "config.json", {**config, key: value})
    (other / "model.safetensors").write_bytes(b"")  # which would end with another error
    write_json(tmp_path / "other.json", {"path": str(other), "files": {}})
    settings = TeacherSettings(model="large", device="cpu", precision="fp32")
    folders = bench.folder / "data", bench.folder / "m/tiny", tmp_path / "other.json", tmp_path / "teacher"
    with pytest.raises(UserError, match=said):
        teacher_probabilities.compute(settings, *folders)
    assert not (tmp_path / "teacher").exists()


def test_a_teacher_or_reference_that_caps_its_scores_is_read_with_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 1}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, attn_logit_softcapping=1.0, initializer_range=0.5))
    model.save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    model.set_attn_implementation("eager")
    loaded, _ = frozen_model.load(tmp_path, [], CPU, "fp32")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_a_cold_teachers_values_are_finite_in_the_file(bench: Bench, tmp_path: Path) -> None:
    """Its log-probabilities are beyond fp16."""
    settings = TeacherSettings(model="large", device="cpu", precision="fp32", top_k=8, temperature=1e-6)
    folders = bench.folder / "data", bench.folder / "m/tiny", bench.folder / "w/other.json", tmp_path / "teacher"
    teacher_probabilities.compute(settings, *folders)
    rows = open_table(tmp_path / "teacher", "train")
    values = np.concatenate(rows[LOG_PROBABILITIES].to_pylist())
    assert values.max() == 0 and values.min() == LEAST_LOG


# Refused columns.

WORDS = 40


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[Any, Path, Path]]:
    """Return a function that writes rows and a good teacher's values, shifted by some tokens; it returns the rows and
    both folders."""

    def write(shift: int = 0, **manifest: Any) -> tuple[Any, Path, Path]:
        draw = np.random.default_rng(0)
        lengths, texts, columns = draw.integers(4, 12, 30), [], []
        for length in lengths:
            labels = draw.integers(0, WORDS, length)
            ids = np.stack([np.roll(labels, -shift), (np.roll(labels, -shift) + 1) % WORDS], 1).astype(np.int32)
            texts.append({"input_ids": [0, *labels], "labels": [IGNORED, *labels], "supervised": int(length)})
            columns.append(
                {
                    IDS: ids.ravel(),
                    LOG_PROBABILITIES: np.tile(np.log([0.6, 0.2]), length).astype(np.float16),
                    REST: np.full(length, np.log(0.2), np.float32),
                    LABEL: np.full(length, np.log(0.6), np.float32),
                }
            )
        data, teacher = tmp_path / "data", tmp_path / "teacher"
        for folder in (data, teacher):
            folder.mkdir(exist_ok=True)
        write_json(data / MANIFEST, {"files": {}})
        origin = sha256(data / MANIFEST)
        table = pyarrow.Table.from_pylist(columns)
        with pyarrow.ipc.new_stream(str(teacher / "train.arrow"), table.schema) as writer:
            writer.write_table(table)
        settings = {"model": "large", "device": "cpu", "precision": "fp32", "top_k": 2}
        values = {"data_manifest_sha256": origin, "settings": settings, "k": 2, "vocabulary": WORDS} | manifest
        write_json(teacher / MANIFEST, {**values, "files": describe(teacher)})
        return Dataset.from_list(texts), data, teacher

    return write


@pytest.mark.parametrize(
    ("shift", "manifest", "settings", "reason"),
    [
        (0, {}, {}, None),
        (1, {}, {}, "values belong to other tokens: .* and that of the labels after these"),
        (-1, {}, {}, "values belong to other tokens: .* and that of the labels before these"),
        (
            0,
            {"data_manifest_sha256": "other"},
            {},
            "values of other rows than .*; run `zerolora stage teacher` again",
        ),
        (0, {"k": 3}, {}, "has not 3 values of teacher_ids a supervised token"),
        (0, {"settings": {"top_k": 2}}, {}, "was written by another version"),
        (0, {}, {"temperature": 2.0}, "of temperature 1.0, and train.distill.temperature is 2.0"),
        (0, {}, {"top_k": 4}, "of top_k 2, and train.distill.top_k is 4"),
    ],
)
def test_values_of_other_tokens_rows_and_settings_are_refused(
    written: Callable[..., tuple[Any, Path, Path]],
    shift: int,
    manifest: dict[str, Any],
    settings: dict[str, Any],
    reason: str | None,
) -> None:
    rows, data, teacher = written(shift, **manifest)
    objective = OBJECTIVES["distill"].configured({"top_k": 2} | settings)
    if reason is None:
        assert IDS in with_teacher(rows, data, teacher, "train", objective).column_names
        return
    with pytest.raises(UserError, match=reason):
        with_teacher(rows, data, teacher, "train", objective)
