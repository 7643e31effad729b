"""Write the plan of each recipe into its README, from estimate and cost model: python docs/recipe_plans.py."""

import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import RunSettings, SampleSettings
from zerolora.errors import UserError
from zerolora.memory.estimate import world_size
from zerolora.memory.training_spec import RowStatistics
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.candidates import Candidate, Planning
from zerolora.planner.choice import choose
from zerolora.planner.run_hardware import hardware_of
from zerolora.planner.slurm_resources import answering_gpu_bytes, answering_rows, of_teacher
from zerolora.planner.user_config import filled, layout_of
from zerolora.train.objectives import OBJECTIVES
from zerolora.units import GIB

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "config/recipes"
MODELS = RECIPES / "models"
MIXTURES = ROOT / "benchmarks/memory/models"
MARK = re.compile(r"(<!-- plan -->\n).*?(<!-- end -->)", re.DOTALL)
PACKED_ROWS = 10_000  # of the assumed data set
PRICED = 10_000_000  # tokens whose cost is shown
TOKEN_BYTES, LINE_BYTES = 4, 70  # of a sampled answer's text and of the rest of its line, assumed


@dataclass(frozen=True)
class Assumed:
    """Assumptions beside the config: the config.json of the models, and lengths in tokens."""

    model: Path
    row: int = 300
    """Mean length of a row; of one of pairs, of both answers with the prompt."""
    teacher: Path | None = None
    """The teacher's config.json."""
    pair: int | None = None
    """Mean length of a row of pairs, in a recipe with other rows too."""
    prompts: tuple[int, int] = (0, 0)
    """Number of prompts that a sample asks, and length of the longest one."""

    def mean(self, settings: RunSettings) -> int:
        """Return the mean length of the rows of a run."""
        return self.pair if self.pair and OBJECTIVES[settings.train.objective].rows == "pairs" else self.row


ASSUMED = {
    "bloom-176b-lora-8x80gb": Assumed(MODELS / "bloom-176b.json"),
    "falcon-180b-lora-8x80gb": Assumed(MODELS / "falcon-180b.json"),
    "falcon-40b-lora-4x80gb": Assumed(MODELS / "falcon-40b.json"),
    "gemma-3-4b-lora-1x24gb": Assumed(MIXTURES / "gemma-3-4b.json"),
    "gemma-4-31b-qlora-1x48gb": Assumed(MODELS / "gemma-4-31b.json"),
    "glm-4.5-air-qlora-1x80gb": Assumed(MODELS / "glm-4.5-air.json"),
    "glm-4.7-flash-qlora-1x48gb": Assumed(MODELS / "glm-4.7-flash.json"),
    "gpt-oss-20b-qlora-1x24gb": Assumed(MIXTURES / "gpt-oss-20b.json"),
    "granite-4.0-h-micro-lora-1x24gb": Assumed(MODELS / "granite-4.0-h-micro.json"),
    "internlm2-chat-7b-qlora-2x24gb": Assumed(MODELS / "internlm2-chat-7b.json"),
    "lfm2-8b-a1b-qlora-1x24gb": Assumed(MODELS / "lfm2-8b-a1b.json"),
    "llama-2-70b-lora-2x8xt4": Assumed(MODELS / "llama-2-70b.json"),
    "llama-3-70b-lora-2x8x80gb": Assumed(MODELS / "llama-3-70b.json"),
    "llama-3-70b-qlora-2x24gb": Assumed(MODELS / "llama-3-70b.json"),
    "llama-3-8b-dora-1x80gb": Assumed(MODELS / "llama-3-8b.json"),
    "llama-3-8b-lora-8x80gb": Assumed(MODELS / "llama-3-8b.json"),
    "llama-3-8b-orpo-qlora-1x24gb": Assumed(MODELS / "llama-3-8b.json", row=800),
    "llama-3.1-8b-distill-70b-8x80gb": Assumed(MODELS / "llama-3.1-8b.json", teacher=MODELS / "llama-3-70b.json"),
    "llama-3.1-8b-128k-8x80gb": Assumed(MODELS / "llama-3.1-8b.json", row=131_072),
    "llama-3.1-8b-rounds-8x80gb": Assumed(MODELS / "llama-3.1-8b.json", row=250, pair=500, prompts=(7_000, 300)),
    "llama-3.2-1b-full-2x24gb": Assumed(MODELS / "llama-3.2-1b.json"),
    "nemotron-3-nano-30b-lora-1x80gb": Assumed(MODELS / "nemotron-3-nano-30b-a3b.json"),
    "olmo-3-7b-qlora-1x24gb": Assumed(MODELS / "olmo-3-7b.json"),
    "qwen2.5-14b-2x32gb": Assumed(MODELS / "qwen2.5-14b.json", row=128),
    "qwen2.5-7b-full-8x80gb": Assumed(MODELS / "qwen2.5-7b.json"),
    "qwen2.5-7b-mixture-8x80gb": Assumed(MODELS / "qwen2.5-7b.json", row=1_000),
    "qwen2.5-7b-qlora-1x24gb": Assumed(MODELS / "qwen2.5-7b.json"),
    "qwen3-30b-a3b-lora-4x80gb": Assumed(MIXTURES / "qwen3-30b-a3b.json"),
    "qwen3-next-80b-qlora-1x80gb": Assumed(MODELS / "qwen3-next-80b-a3b.json"),
    "qwen3.5-27b-qlora-1x48gb": Assumed(MODELS / "qwen3.5-27b.json"),
    "seed-oss-36b-qlora-1x48gb": Assumed(MODELS / "seed-oss-36b.json"),
    "zephyr-7b-dpo-qlora-8x80gb": Assumed(MODELS / "mistral-7b.json", row=800),
}
"""The recipes that are planned for GPUs."""


def plans(name: str) -> dict[str, Candidate | str]:
    """Return the best candidate of each run of a recipe, or the reason that nothing fits. Needs the project's root as
    working directory."""
    return {run: _plan(ASSUMED[name], settings) for run, settings in runs(name).items()}


def runs(name: str) -> dict[str, RunSettings]:
    """Return the settings of each run of a recipe."""
    return resolve(load(RECIPES / name / "config.yaml")).runs


def rows(assumed: Assumed, settings: RunSettings, longest: int) -> RowStatistics:
    """Return the assumed data set: full packed rows, or single rows, half of their tokens supervised."""
    packing = settings.pack.packing
    mean = assumed.mean(settings)
    length = longest if packing else mean
    return RowStatistics(
        packing=packing,
        longest_packed_row=longest,
        most_supervised=longest,
        packed_rows=PACKED_ROWS,
        tokens=PACKED_ROWS * length,
        supervised_tokens=PACKED_ROWS * length // 2,
        mean_row_of_a_token=mean,
        validation_rows=10,
        rows=PACKED_ROWS * length // mean,
    )


def _plan(assumed: Assumed, settings: RunSettings) -> Candidate | str:
    model, hardware = read_model_spec(assumed.model), hardware_of(settings.render)[0]
    user = settings.render.user_config
    layout = None if user is None else layout_of(filled(user, model.hidden))
    data = rows(assumed, settings, settings.pack.capacity or assumed.mean(settings))
    try:
        return choose(Planning(model, settings.render, data, hardware, layout))[0]
    except UserError as error:
        return str(error)


def written(name: str, text: str, planned: dict[str, Candidate | str]) -> str:
    """Return the README of a recipe with the table of the result of `plans`."""
    assumed = ASSUMED[name]
    settings = next(iter(runs(name).values()))
    table = "\n".join(
        [
            "| run | strategy | micro-batch | checkpointing | GPU GiB | host GiB | s/step | tokens/s | GPU-hours |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(name, run, best) for run, best in planned.items()),
        ]
    )
    more = f"\n\n{_teaching(assumed.teacher, settings)}" if assumed.teacher else ""
    more += f"\n\n{_sampling(name, assumed, planned)}" if assumed.prompts[0] else ""
    return MARK.sub(lambda match: f"{match[1]}{_assumption(assumed, settings)}\n\n{table}{more}\n{match[2]}", text)


def _teaching(teacher: Path, settings: RunSettings) -> str:
    """Return the plan of the stage `teacher` for PRICED tokens, half of them supervised."""
    spec, supervised = read_model_spec(teacher), PRICED // 2
    chosen, longest = settings.teacher, settings.pack.capacity
    if chosen is None or longest is None:
        raise ValueError("the run has no teacher, or no packed rows")
    needs = of_teacher(spec, 2 * spec.parameters, chosen, PRICED, supervised, longest, settings.render)
    objective = OBJECTIVES[settings.train.objective].configured(settings.render.objective_settings)
    text = (
        f"The stage `teacher`, for {PRICED // 10**6} million tokens, once for all runs and epochs: {needs['gpus']} "
        f"GPUs for {needs['seconds'] / 3600:.1f} hours, {needs['host_bytes'] / GIB:.0f} GiB of host memory while it "
        f"loads, and {objective.row_bytes(supervised) / GIB:.2f} GiB on disk, {objective.row_bytes(1)} bytes for each "
        "supervised token."
    )
    return _filled(text)


def _sampling(name: str, assumed: Assumed, planned: dict[str, Candidate | str]) -> str:
    """Return the plan of the stage `sample` for the assumed prompts, and of training on the most rows that are selected
    of its answers."""
    resolved, (prompts, longest) = resolve(load(RECIPES / name / "config.yaml")), assumed.prompts
    text = (
        f"The stage `sample`, for {prompts:,} prompts of up to {longest:,} tokens, assumed as the rows are. Time, "
        f"memory and bytes are those of answers of `max_new_tokens` tokens of {TOKEN_BYTES} bytes each; work/samples "
        "has about as many bytes again."
    )
    table = "\n".join(
        [
            "| sample | answers | GPUs | GPU GiB | host GiB | hours | GPU-hours | answers.jsonl, MB |",
            "|---|---|---|---|---|---|---|---|",
            *(_sample_row(each, assumed, sample, resolved.runs) for each, sample in resolved.samples.items()),
        ]
    )
    selected: dict[str, list[str]] = {}
    for run, settings in resolved.runs.items():
        selection, best = resolved.selections.get(settings.dataset), planned[run]
        if selection and selection.most and not isinstance(best, str):
            most, mean = selection.most * prompts, assumed.mean(settings)
            hours = most * mean / _speed(assumed, settings, best) / 3600 * world_size(settings.render)
            sentence = (
                f"at most {most:,} rows of {mean:,} tokens, in packed rows of {settings.pack.capacity:,}: "
                f"{most * mean / 1e6:.1f} million tokens and {hours:.2g} GPU-hours of training"
            )
            selected.setdefault(sentence, []).append(f"`{run}`")
    last = [f"{' and '.join(names)}: {sentence}, each." for sentence, names in selected.items()]
    return "\n\n".join(filter(None, (_filled(text), table, _filled(" ".join(last)))))


def _sample_row(name: str, assumed: Assumed, sample: SampleSettings, of: dict[str, RunSettings]) -> str:
    spec, (prompts, longest) = read_model_spec(assumed.model), assumed.prompts
    run = of[sample.of.run or next(iter(of))].render
    answers, stored = prompts * sample.n, 2 * spec.parameters
    needs = answering_rows(sample, spec, stored, answers, longest, run, None)
    gpu = answering_gpu_bytes(sample, spec, stored, longest, run, needs["gpus"] // sample.ranks)
    hours, size = needs["seconds"] / 3600, answers * (TOKEN_BYTES * sample.max_new_tokens + LINE_BYTES)
    return (
        f"| `{name}` | {answers:,} | {needs['gpus']} | {gpu / GIB:.1f} | {needs['host_bytes'] / GIB:.0f} | "
        f"{hours:.2g} | {hours * needs['gpus']:.2g} | {size / 1e6:.0f} |"
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 125, break_on_hyphens=False)


def _assumption(assumed: Assumed, settings: RunSettings) -> str:
    """Return the description of a table's figures."""
    longest = settings.pack.capacity
    data = f"packed rows of {longest:,} tokens, made of rows of" if longest else "rows of"
    source = hardware_of(settings.render)[1]
    text = (
        f"Predicted by the estimate and the cost model ({source}) for {data} {assumed.row:,} tokens, half of them "
        f"supervised. GPU and host memory are of one GPU and one machine, GPU-hours those of {PRICED // 10**6} million "
        "tokens. Nothing in this table was measured."
    )
    return _filled(text)


def _row(name: str, run: str, planned: Candidate | str) -> str:
    if isinstance(planned, str):
        first = planned.splitlines()[0]
        return f"| `{run}` | does not fit: {first} | | | | | | | |"
    settings, choice = runs(name)[run], planned.choice
    ranks = world_size(settings.render)
    tokens_per_second = _speed(ASSUMED[name], settings, planned)
    return (
        f"| `{run}` | `{choice.strategy}` | {choice.micro_batch} x {choice.accumulation} | "
        f"{'yes' if choice.activation_checkpointing else 'no'} | {planned.gpu / GIB:.1f} | {planned.host / GIB:.0f} | "
        f"{planned.seconds:.3g} | {tokens_per_second:,.0f} | {PRICED / tokens_per_second / 3600 * ranks:.3g} |"
    )


def _speed(assumed: Assumed, settings: RunSettings, planned: Candidate) -> float:
    """Return the tokens that training processes in a second."""
    data = rows(assumed, settings, settings.pack.capacity or assumed.mean(settings))
    return data.tokens / data.packed_rows * settings.render.global_batch / planned.seconds


def main() -> None:
    """Write the tables."""
    os.chdir(ROOT)
    for name in ASSUMED:
        document = RECIPES / name / "README.md"
        text = document.read_text(encoding="utf-8")
        document.write_text(written(name, text, plans(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
