"""Stage sample: samples n answers of a model to each prompt of a data set's training rows.

    zerolora stage sample NAME

Writes answers.jsonl (a line for each prompt, by its row in the split `prompts`, and number of the answer), sample.json
(counts, speed, memory) and manifest.json (settings, prompts, model, engine). Answers stay in work/samples/NAME, so that
a killed sample resumes, and a larger `n` only adds to them.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.config.settings import SampleSettings
from zerolora.data.prepared_rows import PROMPTS
from zerolora.errors import UserError, shown
from zerolora.evaluate import vllm_engine
from zerolora.evaluate.evaluate import resources_of
from zerolora.evaluate.evaluated_models import EvaluatedModel, load_tokenizer
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json, write_text
from zerolora.log import LOGGER, result
from zerolora.machine import cpu_matmul
from zerolora.methods.peft_format import ADAPTER
from zerolora.model import added_tokens, foreign
from zerolora.model.answer_text import AnswerTexts
from zerolora.sample.draw_ranks import draw_here, draw_on_ranks
from zerolora.sample.draws import seed_of
from zerolora.sample.kept_samples import Answers, Sampled, answers_in, key_of, open_folder
from zerolora.sample.prompt_batches import AskedPrompt, batches_of, check_room, missing, read_prompts
from zerolora.sample.served import ask_served
from zerolora.units import counted

ANSWERS, COUNTS = "answers.jsonl", "sample.json"


def sample(
    settings: SampleSettings,
    name: str,
    data: Path,
    model: EvaluatedModel | None,
    work: Path,
    output: Path,
    environment: Mapping[str, str],
) -> None:
    """Sample answers to the prompts in `data`, and write them to directory `output`; `name` is the sample's, for
    messages, and `model` is None for a served one.

    Answers in directory `work` are kept. Raises UserError if there are no prompts, if one with its answer is longer
    than the rows that the model takes, or if another process or a server fails.
    """
    prompts = read_prompts(data)
    resources: dict[str, Any] = {}
    if model is None:
        engine = "served"
        answers, known = ask_served(settings, name, data, prompts, work, environment)
    else:
        engine, answers, resources = _draw(settings, name, data, model, prompts, work)
        known = _identity(data, model)
    lines = []
    for row, prompt in enumerate(prompts):
        for number in range(settings.n):
            text, tokens, ended, whole = answers[prompt.key.hex(), number]
            assert isinstance(text, str)
            cut = text[: min((text.find(end) for end in settings.stop if end in text), default=len(text))]
            line = {"row": row, "sample": number, "text": cut, "tokens": tokens, "ended": ended, "whole": whole}
            lines.append(line)
    counts = _counts(lines, prompts)
    with staged_directory(output) as folder:
        write_text(folder / ANSWERS, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        manifest = {
            "settings": settings.model_dump(mode="json", exclude={"batch", "ranks"}),
            "prompts": sha256(data / f"{PROMPTS}.arrow"),
            "model": known,
            "engine": engine,
            # Times differ in each run, and are no reason to select again.
            "files": describe(folder),
        }
        write_json(folder / MANIFEST, manifest)
        write_json(folder / COUNTS, {**counts, **resources})
    result(f"{counted(len(lines), 'answer')} to {counted(len(prompts), 'prompt')}, {counts['ended_rate']:.0%} ended")


def _counts(lines: list[dict[str, Any]], prompts: list[AskedPrompt]) -> dict[str, float]:
    tokens = [line["tokens"] for line in lines if line["tokens"] is not None]
    return {
        "prompts": len(prompts),
        "answers": len(lines),
        "distinct_answers": len({(line["row"], line["text"]) for line in lines}),
        "ended_rate": sum(line["ended"] for line in lines) / len(lines),
        "whole_rate": sum(line["whole"] for line in lines) / len(lines),
        "tokens_per_answer": sum(tokens) / len(tokens) if tokens else 0.0,
    }


def _identity(data: Path, model: EvaluatedModel) -> dict[str, Any]:
    """Return what tells the model from others: the base model's name and manifest, as of the data set, and hashes of
    the manifest and the tensors of the adapter."""
    known: dict[str, Any] = {"base": foreign.manifest(data / MANIFEST, "zerolora stage prepare", "model")["model"]}
    if model.adapter:
        files = {"adapter": model.adapter / MANIFEST, "adapter_tensors": model.adapter / ADAPTER}
        known |= {name: sha256(file) for name, file in files.items() if file.is_file()}
    return known


def _draw(
    settings: SampleSettings, name: str, data: Path, model: EvaluatedModel, prompts: list[AskedPrompt], work: Path
) -> tuple[str, Answers, dict[str, Any]]:
    """Return the engine, the answers of a local model, and what they took."""
    if settings.temperature == 0 and settings.n > 1:
        raise UserError(f"samples.{name}.n: {settings.n} with temperature 0, whose answers are all the same; use 1")
    section = f"samples.{name}"
    vllm = settings.engine == "vllm"
    engine = vllm_engine.check(settings, data, model, section) if vllm else f"transformers {version('transformers')}"
    weights = model.merged or model.base
    check_room(max(len(prompt.tokens) for prompt in prompts), settings.max_new_tokens, weights, section)
    _check_stop(settings, load_tokenizer(weights, added_tokens.of_data(data), model.loaded_adapter)[0], section)
    if model.device == "cpu":
        cpu_matmul.choose()
    folder = open_folder(work, key_of(settings, data, model, engine))
    before = answers_in(folder)
    wanted = [(prompt.key.hex(), number) for prompt in prompts for number in range(settings.n)]
    done = sum(key in before for key in wanted)
    if done:
        LOGGER.info(f"sample: {counted(done, 'answer')} of {len(wanted):,} are there already")
    batches = list(missing(batches_of(prompts, settings.n, settings.batch), prompts, before))
    if vllm and done < len(wanted):
        # Its batches are its own: the last bits of its logits, and so the draws, may depend on what else is asked.
        seeds = [
            [[prompt.key.hex(), number], prompt.tokens, seed_of(settings.seed, prompt.key, number)]
            for prompt in prompts
            for number in range(settings.n)
            if (prompt.key.hex(), number) not in before
        ]
        drawing = {"temperature": settings.temperature, "top_p": settings.top_p}
        vllm_engine.run(settings, data, model, seeds, folder, len(wanted), section, drawing)
    elif batches and settings.ranks > 1:
        draw_on_ranks(settings, data, model, batches, folder, len(before) + len(wanted) - done)
    elif batches:
        draw_here(settings, data, model, prompts, batches, folder, done)
    answers = answers_in(folder)
    if lacking := next((key for key in wanted if key not in answers), None):
        raise UserError(
            f"{folder}: has no answer {lacking[1]} to prompt {lacking[0]}; run `zerolora stage sample` again"
        )
    if vllm:
        answers = _decoded(settings, data, model, {key: answers[key] for key in wanted})
    tokens = sum(answers[key].tokens or 0 for key in wanted)
    return engine, answers, {"new_answers": len(wanted) - done, "engine": engine, **resources_of(folder, tokens)}


def _check_stop(settings: SampleSettings, tokenizer: Any, section: str) -> None:
    """Raise UserError for a stop text with a special token, which is in no text."""
    for end in settings.stop:
        if token := next((each for each in tokenizer.all_special_tokens if each in end), None):
            raise UserError(
                f"{section}.stop: {shown(end)} has the special token {shown(token)}, which is in no text; remove it, "
                "and add the token to stop_tokens in prepare unless it ends answers already"
            )


def _decoded(settings: SampleSettings, data: Path, model: EvaluatedModel, answers: Answers) -> Answers:
    """Return answers of another engine, which are tokens, as texts."""
    weights = model.merged or model.base
    tokenizer, _ = load_tokenizer(weights, added_tokens.of_data(data), model.loaded_adapter)
    texts = AnswerTexts(tokenizer, vllm_engine.stops_for(model, weights, data), settings.stop)
    result = {}
    for key, answer in answers.items():
        assert not isinstance(answer.text, str)
        result[key] = Sampled(*texts.of(answer.text))
    return result
