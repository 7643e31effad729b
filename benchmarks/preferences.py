"""Make the pairs of the recipe smollm2-135m-preferences, and collect its results.

    .venv/bin/zerolora init --recipe smollm2-135m-preferences --force
    .venv/bin/snakemake --profile profiles/local results/first/adapter/manifest.json
    .venv/bin/python benchmarks/preferences.py --rows      # the pairs, from the models' own answers: six minutes
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/preferences.py [--project DIRECTORY]

The rejected answers are greedy ones: of the base model to sums, and of the run `first` to the reference task, a digit
off; of its right answers in the test rows a digit is replaced. Writes benchmarks/results/preferences.json and
prints the table of the recipe's README.
"""

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import RESULTS, machine, parser_of, table

from zerolora.files import read_json, write_json

RECIPE = Path("config/recipes/smollm2-135m-preferences")
MODEL = "resources/weights/smollm2-135m-instruct"
TRAIN, TEST_SUMS, TEST_DIGITS, ASKED = 48, 100, 120, 300
RUNS = {
    "sums_dpo_alone": "DPO without the SFT term",
    "sums_dpo": "DPO",
    "sums_sft": "SFT on the chosen answers",
    "digits_dpo_alone": "DPO without the SFT term",
    "digits_dpo": "DPO",
    "digits_sft": "SFT on the chosen answers",
}
FIGURES = {"sums": "format_rate", "digits": "accuracy"}
"""The figure of each task: the share of bare numbers, and of right answers."""


def main() -> None:
    """Make the pairs; or collect, write, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, default=Path())
    parser.add_argument("--rows", action="store_true", help="make the pairs")
    options = parser.parse_args()
    if options.rows:
        sums(options.project)
        digits(options.project)
        return
    result = collected(options.project)
    write_json(RESULTS / "preferences.json", result)
    print(markdown(result))


def sums(project: Path) -> None:
    """Write the pairs of sums of two numbers from 10 to 99."""
    draw = random.Random(1)  # noqa: S311 - data, not secrets
    drawn = sorted({(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(170)}, key=_mixed)[:160]
    questions = [f"What is {one} + {two}?" for one, two in drawn]
    own = answers_of(project, questions, None)
    rows = [
        {"prompt": question, "chosen": str(one + two), "rejected": answer}
        for question, (one, two), answer in zip(questions, drawn, own, strict=True)
        if answer != str(one + two)
    ]
    _write(project, "sums", rows[:TRAIN], rows[TRAIN : TRAIN + TEST_SUMS])


def _mixed(pair: tuple[int, int]) -> int:
    return (pair[0] * 7919 + pair[1] * 104729) % 1009


def digits(project: Path) -> None:
    """Write the pairs of the reference task, and the share of right answers of `first` in the test rows."""
    rows = read_json(project / "data/reference.json", "git checkout")
    random.Random(0).shuffle(rows)  # noqa: S311 - data, not secrets
    rows = rows[:ASKED]
    own = answers_of(project, [row["instruction"] for row in rows], project / "results/first/adapter")
    draw = random.Random(2)  # noqa: S311 - data, not secrets
    pairs = [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": answer}
        for row, answer in zip(rows, own, strict=True)
    ]
    test = pairs[:TEST_DIGITS]
    right = sum(pair["chosen"] == pair["rejected"] for pair in test)
    test = [pair if pair["chosen"] != pair["rejected"] else pair | {"rejected": _off(pair, draw)} for pair in test]
    train = [pair for pair in pairs[TEST_DIGITS:] if pair["chosen"] != pair["rejected"]]
    _write(project, "digits", train[:TRAIN], test)
    write_json(project / "work/first.json", {"accuracy": right / TEST_DIGITS})


def _off(pair: dict[str, str], draw: random.Random) -> str:
    text = pair["rejected"]
    place = draw.choice([number for number, letter in enumerate(text) if letter.isdigit()])
    return text[:place] + str((int(text[place]) + draw.randint(1, 9)) % 10) + text[place + 1 :]


def _write(project: Path, name: str, *splits: list[dict[str, str]]) -> None:
    for split, rows in zip(("train", "test"), splits, strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (project / RECIPE / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")


def answers_of(project: Path, questions: list[str], adapter: Path | None) -> list[str]:
    """Return greedy answers of the base model, with an adapter or without."""
    import torch

    from zerolora.evaluate.evaluated_models import load

    model, tokenizer = load(project / MODEL, torch.device("cpu"), [], adapter)
    tokenizer.padding_side = "left"
    result: list[str] = []
    for start in range(0, len(questions), 50):
        turns = [[{"role": "user", "content": question}] for question in questions[start : start + 50]]
        texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in turns]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            tokens = model.generate(**batch, max_new_tokens=32, do_sample=False)
        answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        result += [answer.strip() for answer in answers]
    return result


def collected(project: Path) -> dict[str, Any]:
    """Return the figures of every run."""
    runs = {}
    for run in RUNS:
        folder = project / "results" / run / "metrics"
        evaluated, trained = (read_json(folder / f"{name}.json", "snakemake") for name in ("evaluate", "train"))
        figures = {name: evaluated[name] for name in ("accuracy", "format_rate", "rows")}
        names = ("reward_accuracy_last", "chosen_change_last", "rejected_change_last")
        runs[run] = figures | {name: trained[name] for name in names if name in trained}
    return {
        "machine": machine(),
        "base": {"sums": read_json(project / "results/base/sums/evaluate.json", "snakemake")["format_rate"]},
        "first": read_json(project / "work/first.json", "benchmarks/preferences.py --rows")["accuracy"],
        "runs": runs,
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    before = {"sums": result["base"]["sums"], "digits": result["first"]}
    rows = []
    for run, name in RUNS.items():
        task, figures = run.split("_")[0], result["runs"][run]
        changes = [figures.get(f"{each}_last") for each in ("reward_accuracy", "chosen_change", "rejected_change")]
        shown = ["" if value is None else f"{value:.2f}" if not number else f"{value:+.1f}"
                 for number, value in enumerate(changes)]  # fmt: skip
        rows.append((task, name, f"{before[task]:.2f}", f"{figures[FIGURES[task]]:.2f}", *shown))
    titles = ("reward accuracy", "change of the chosen", "of the rejected")
    return table(["task", "training", "before", "after", *titles], rows)


if __name__ == "__main__":
    main()
