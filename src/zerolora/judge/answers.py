"""The greedy answers of base and tuned model to both turns of each question, through one chat template."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import canonical
from zerolora.judge.prompts import TURNS, Answers, JudgeQuestion
from zerolora.judge.work_file import WorkFile
from zerolora.log import LOGGER
from zerolora.model.architecture import tokenizer_of
from zerolora.types import Device


@dataclass(frozen=True)
class Contender:
    """A model that answers."""

    name: str
    weights: Path
    """Directory of its weights and tokenizer."""
    adapter: Path | None
    """Directory of the adapter to load onto them, if any."""
    identity: str
    """Unique to its weights: answers of another identity are generated again."""
    device: Device = "cpu"


def answer_all(
    questions: list[JudgeQuestion], contenders: list[Contender], data: Path, max_new_tokens: int, kept: WorkFile
) -> Answers:
    """Return the answers of each contender to all questions, the second turn after its own first answer.

    All use the chat template of the last contender, the tuned model, and the stop tokens of `data`. Answers in `kept`
    are not generated again. Raises UserError if there is no chat template, or if it refuses a question.
    """
    weights = contenders[-1].weights
    template = tokenizer_of(weights).chat_template
    if not isinstance(template, str):
        raise UserError(f"{weights}: the tokenizer has no chat template; set prepare.NAME.template")
    return {each.name: _answers(questions, each, template, data, max_new_tokens, kept) for each in contenders}


def _answers(
    questions: list[JudgeQuestion], contender: Contender, template: str, data: Path, max_new_tokens: int, kept: WorkFile
) -> dict[str, tuple[str, str]]:
    chats: dict[str, list[dict[str, str]]] = {question.id: [] for question in questions}
    generate: Callable[[list[list[dict[str, str]]]], list[str]] | None = None
    for turn in range(TURNS):
        for question in questions:
            chats[question.id].append({"role": "user", "content": question.turns[turn]})
        decides = [contender.name, contender.identity, contender.device, template, max_new_tokens]
        keys = {name: hashlib.sha256(canonical([*decides, chat]).encode()).hexdigest() for name, chat in chats.items()}
        missing = [name for name, key in keys.items() if key not in kept.pieces]
        if missing:
            generate = generate or _generator(contender, template, data, max_new_tokens)
            LOGGER.info("judge: %s answers turn %d of %d questions", contender.name, turn + 1, len(missing))
            for name, answer in zip(missing, generate([chats[name] for name in missing]), strict=True):
                kept.add({"key": keys[name], "answer": answer})
        for name, key in keys.items():
            chats[name].append({"role": "assistant", "content": kept.pieces[key]["answer"]})
    return {name: (chat[1]["content"], chat[3]["content"]) for name, chat in chats.items()}


def _generator(
    contender: Contender, template: str, data: Path, max_new_tokens: int
) -> Callable[[list[list[dict[str, str]]]], list[str]]:
    """Load a contender and return a function from conversations to answers."""
    from zerolora.config.settings import EvaluateSettings
    from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
    from zerolora.evaluate.generation import generate
    from zerolora.machine import cpu_matmul
    from zerolora.model import added_tokens

    if contender.device == "cpu":
        cpu_matmul.choose()
    answering = EvaluatedModel(contender.weights, device=contender.device)
    tokens = added_tokens.of_data(data)
    model, tokenizer = load(contender.weights, answering.torch_device, tokens, contender.adapter)
    stops = stops_of(answering, model, tokenizer, data)
    settings = EvaluateSettings(check="exact", max_new_tokens=max_new_tokens)

    def answer(chats: list[list[dict[str, str]]]) -> list[str]:
        rows = [_row(tokenizer, template, chat) for chat in chats]
        return [text.strip() for text in generate(model, tokenizer, rows, stops, settings)[0]]

    return answer


def _row(tokenizer: Any, template: str, chat: list[dict[str, str]]) -> dict[str, Any]:
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=True, tokenize=False)
    except UserError as error:
        raise UserError(f"a question of two turns: {error}; choose another template") from None
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"input_ids": tokens, "prompt": len(tokens)}
