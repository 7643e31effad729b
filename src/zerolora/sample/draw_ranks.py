"""Draws the answers of a sample with transformers, in this process or by several ranks.

Each rank is a process, python -m zerolora.sample.draw_ranks FILE, that loads the model and draws the answers of its
batches, as in evaluate/ranks.py.
"""

from pathlib import Path
from typing import Any

from zerolora.config.settings import SampleSettings
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.evaluated_models import EvaluatedModel, stops_of
from zerolora.evaluate.kept import wait_for
from zerolora.evaluate.ranks import begin_rank, load_for, main, start_ranks, write_answers
from zerolora.machine.peak_memory import PeakMemory
from zerolora.sample.answering import Keep, draw_answers
from zerolora.sample.kept_samples import answers_in
from zerolora.sample.prompt_batches import AskedPrompt, Batch, read_prompts


def draw_on_ranks(
    settings: SampleSettings, data: Path, model: EvaluatedModel, batches: list[Batch], folder: Path, answers: int
) -> None:
    """Draw the answers of batches on several ranks, into `folder`, which will have `answers`. Raises UserError as soon
    as a rank fails."""
    # In turn, so that each rank has prompts of all lengths.
    shares = [share for number in range(settings.ranks) if (share := batches[number :: settings.ranks])]
    ranks = start_ranks("zerolora.sample.draw_ranks", settings.model_dump(mode="json"), data, model, folder, shares)
    wait_for(ranks, folder, answers, "sample")


def draw_here(
    settings: SampleSettings,
    data: Path,
    model: EvaluatedModel,
    prompts: list[AskedPrompt],
    batches: list[Batch],
    folder: Path,
    done: int,
) -> None:
    """Draw the answers of batches in this process, into `folder`; `done` were there before."""
    memory = PeakMemory(model.torch_device)
    _draw(settings, data, model, prompts, batches, folder, memory, done=done)


def _draw(
    settings: SampleSettings,
    data: Path,
    model: EvaluatedModel,
    prompts: list[AskedPrompt],
    batches: list[Batch],
    folder: Path,
    memory: PeakMemory,
    rank: int = 0,
    ranks: int = 1,
    parent: int | None = None,
    done: int = 0,
) -> None:
    loaded, tokenizer = load_for(settings, data, model, max(len(prompt.tokens) for prompt in prompts))
    ready = loaded, tokenizer, stops_of(model, loaded, tokenizer, data)
    room, known = PromptBatches(loaded, settings, ranks), answers_in(folder).keys()

    def answered(keep: Keep) -> int:
        def keep_new(lines: list[list[Any]]) -> None:
            keep([line for line in lines if tuple(line[0]) not in known])

        return draw_answers(ready, settings, prompts, batches, room, keep_new, done, silent=parent is not None)

    write_answers(folder, rank, memory, answered, parent)


def run_rank(spec: dict[str, Any]) -> None:
    """Draw the answers of the batches in `spec`, from the file that the parent wrote."""
    settings, data = SampleSettings.model_validate(spec["settings"]), Path(spec["data"])
    model, memory = begin_rank(spec)
    batches = [Batch(*each) for each in spec["share"]]
    folder, parent = Path(spec["folder"]), int(spec["parent"])
    _draw(settings, data, model, read_prompts(data), batches, folder, memory, spec["rank"], spec["ranks"], parent)


if __name__ == "__main__":
    main(run_rank, "sample")
