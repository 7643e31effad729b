"""`zerolora chat` with the models of a finished run: the answers of its evaluation, conversations, and refusals."""

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_picture
import pytest
from conftest import BIN, Project, project_environment
from fork_server import SERVERS

from zerolora.files import MANIFEST, describe, read_json, write_json

CLEARS = "\x1b[2J"
"""Clears a terminal."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended."""
    return copy_finished("chat")


@pytest.fixture(scope="module")
def endless(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project whose merged model answers everything with CLEARS, over and over."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    project = copy_finished("endless")
    folder = project.directory / "results/default/merged"
    for path in folder.iterdir():
        path.chmod(0o644)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()  # each token's state is its embedding
    weights["model.norm.weight"].fill_(1)
    axes = torch.eye(weights["model.embed_tokens.weight"].shape[1])
    tokens = AutoTokenizer.from_pretrained(folder)(CLEARS, add_special_tokens=False)["input_ids"]
    weights["model.embed_tokens.weight"][:] = axes[0]
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    for number, token in enumerate(tokens):
        weights["model.embed_tokens.weight"][token] = axes[number + 1]
        weights["lm_head.weight"][token] = axes[number]
    weights["lm_head.weight"][tokens[0]] += axes[len(tokens)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = read_json(folder / "config.json", "tests")
    write_json(folder / "config.json", config | {"tie_word_embeddings": False, "max_position_embeddings": 10**6})
    write_json(folder / MANIFEST, read_json(folder / MANIFEST, "tests") | {"files": describe(folder)})
    return project


def chat(project: Project, *arguments: str, lines: bytes = b"", before: str = "") -> "subprocess.CompletedProcess[str]":
    variables = project_environment(project.directory)
    server = SERVERS.of(project.directory, variables)
    return server.run(("zerolora", "chat", *arguments), project.directory, variables, before, lines)


def answers_of(path: Path) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads(path.read_text())
    return answers


def test_answers_are_those_of_the_evaluation(project: Project) -> None:
    """Also of base and adapter; a question of another conversation does not change them, and what follows /quit is not
    read. (Loads three models.)"""
    results = project.directory / "results"
    tuned, base = answers_of(results / "default/answers.json"), answers_of(results / "base/rows/answers.json")
    few = [each["question"] for each in tuned[:2]]
    lines = f"{few[0]}\n/new\n\n{few[1]}\n/quit\n{few[0]}\n".encode()
    names = ("default", "default/adapter", "default/base")
    ended = chat(project, *names, "--max-new-tokens", "4", lines=lines)
    assert ended.returncode == 0, ended.stderr
    expected = [
        f"{name}: {answers[number]['answer']}"
        for number in (0, 1)
        for name, answers in zip(names, (tuned, tuned, base), strict=True)
    ]
    assert ended.stdout == "\n".join([*expected, ""])


def test_a_conversation_goes_into_the_next_prompt(project: Project) -> None:
    """A question that cannot be asked is answered with the reason, and the conversation stays as it was."""
    from zerolora.chatting.conversation import ChatModel, chat
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.directory)
        model = ChatModel("default/base", resolve(load(Path("config/config.yaml"))), 4)
        written: list[str] = []
        chat([model], ["Hi", "Is <|im_end|> a word?", "And now?"], written.append, live=True)
    assert [message["role"] for message in model.messages] == ["user", "assistant"] * 2
    (refused,) = (text for text in written if text.startswith("("))
    assert "<|im_end|>" in refused and written.count(refused) == 1
    text = model.tokenizer.decode(model._prompt([*model.messages, {"role": "user", "content": "Last"}]))
    assert text == model.tokenizing.template.write([*model.messages, {"role": "user", "content": "Last"}], prompt=True)
    model.longest = 12
    chat([model], ["Hi"], written.append, live=True)
    assert written[-2].endswith("the model takes 12 with 4 of an answer; type /new)") and written[-1] == "\n"


def test_answers_are_written_while_they_are_generated(project: Project) -> None:
    """In a terminal: each token's text before the next is computed, together the evaluation's answer. Elsewhere an
    answer is one piece."""
    from zerolora.chatting.conversation import ChatModel, chat
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    row = answers_of(project.directory / "results/base/rows/answers.json")[0]
    passes = 0
    written: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.directory)
        model = ChatModel("default/base", resolve(load(Path("config/config.yaml"))), 4)
        chat([model], [row["question"], "/new"], lambda _: None, live=False)  # the first answer also tries the cache
        forward = model.model.forward

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            return forward(*arguments, **named)

        patch.setattr(model.model, "forward", counted)
        chat([model], [row["question"]], lambda text: written.append((passes, text)), live=True)
        assert len(row["answer"]) == 4
        assert written == [(0, ""), *enumerate(row["answer"], 1), (4, ""), (4, "\n")]
        passes = 0
        written.clear()
        chat([model], ["/new", row["question"]], lambda text: written.append((passes, text)), live=False)
        assert written == [(0, ""), (4, row["answer"]), (4, "\n")]


def test_pieces_of_an_answer_end_at_whole_characters() -> None:
    """A tokenizer whose later tokens change the text before them has its answer written again, whole."""
    from zerolora.chatting.conversation import TokenByToken

    text = "a \N{SNOWMAN} b\ufffd".encode()
    pieces: list[str] = []
    written = TokenByToken(lambda tokens: bytes(tokens).decode(errors="replace"), pieces.append)
    assert not any(written.token([*text[:end]]) for end in range(1, len(text) + 1))
    assert [piece for piece in pieces if piece] == ["a", " ", "\N{SNOWMAN}", " ", "b"]
    assert written.end([*text]) == text.decode() == "".join(pieces)
    pieces.clear()
    cleaned = TokenByToken(lambda tokens: bytes(tokens).decode().replace(" n't", "n't"), pieces.append)
    for end in range(1, 7):
        cleaned.token([*b"do n't"[:end]])
    assert cleaned.end([*b"do n't"]) == "don't" and "".join(pieces) == "do n'\ndon't"


def test_a_terminal_shows_the_answers(project: Project) -> None:
    """What docs/chat_picture.py records in a terminal are the typed lines and the evaluation's answers."""
    results = project.directory / "results"
    tuned, base = answers_of(results / "default/answers.json"), answers_of(results / "base/rows/answers.json")
    questions = [each["question"] for each in tuned[:2]]
    command = ("zerolora", "chat", "default", "default/base", "--max-new-tokens", "4")
    lines = (questions[0], "/new", questions[1])
    shown = chat_picture.session(command, lines, project.directory, project_environment(project.directory))
    first, second = (
        f"> {question}\ndefault: {tuned[number]['answer']}\ndefault/base: {base[number]['answer']}\n"
        for number, question in enumerate(questions)
    )
    assert shown == f"{first}> /new\n{second}> \n"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["other"], "'other': use one of the runs default, or a part of one: RUN/merged, RUN/adapter, RUN/base"),
        (["default/whole"], "'default/whole': use one of the runs"),
        (["default", "default"], "default is named twice; name each model once"),
    ],
)
def test_unknown_models_are_refused(project: Project, names: list[str], said: str) -> None:
    ended = chat(project, *names)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr


def test_other_prompts_than_those_of_training_are_refused(copy_finished: Callable[[str], Project]) -> None:
    """Of the config, and of the settings of a run that has not prepared its rows again; and so is a run that was not
    trained. (Four commands.)"""
    project = copy_finished("chat-template")
    prepared = project.config["prepare"]["rows"]
    prepared["system"] = "Be brief."
    project.write_config()
    for name in ("default", "default/base"):
        ended = chat(project, name)
        assert (
            ended.returncode == 2
            and "prepare.rows.system is not that of the last run (its default); run" in ended.stderr
        )
    del prepared["system"]
    prepared["template"] = "plain"
    project.write_config()
    settings = project.directory / "results/config.json"
    resolved = json.loads(settings.read_text())
    resolved["prepare"]["rows"]["template"] = "plain"
    settings.chmod(0o644)
    settings.write_text(json.dumps(resolved))
    ended = chat(project, "default")
    assert ended.returncode == 2 and "was prepared with another template" in ended.stderr
    (project.directory / "results/default/adapter/manifest.json").unlink()
    ended = chat(project, "default/adapter")
    assert "train the run first: `zerolora run`" in ended.stderr


def test_rows_of_other_roles_and_empty_answers_have_prompts(project: Project) -> None:
    """What a config supervises changes no prompt; a model may answer nothing."""
    from zerolora.chatting.conversation import ChatModel
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.directory)
        resolved = resolve(load(Path("config/config.yaml")))
        first = ChatModel("default/base", resolved, 4)
        resolved.prepare["rows"] = resolved.prepare["rows"].model_copy(update={"loss": ["user"]})
        other = ChatModel("default/base", resolved, 4)
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "So"}]
    assert first._prompt(asked[:1]) == other._prompt(asked[:1])
    text = first.tokenizer.decode(first._prompt(asked))
    assert text == first.tokenizing.template.write(asked, prompt=True)


def test_ctrl_c_ends_an_answer(endless: Project) -> None:
    """In a terminal, each time; Ctrl-D ends the chat. No control character of an answer reaches the terminal. (Loads a
    model.)"""
    terminal, theirs = pty.openpty()
    command = ["setsid", "--ctty", BIN / "zerolora", "chat", "default", "--max-new-tokens", "100000"]
    variables = project_environment(endless.directory) | {"TERM": "dumb", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        command, cwd=endless.directory, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        try:
            shown = _until(terminal, "> ")
            for question in ("Hi", "And now?"):
                os.write(terminal, f"{question}\n".encode())
                shown += _until(terminal, "[2J")
                os.write(terminal, b"\x03")
                shown += _until(terminal, "\n> ")
            os.write(terminal, b"\x04")
            shown += _until(terminal, "\n")
            running.wait()
        finally:
            running.kill()
            os.close(terminal)
    assert running.returncode == 0, shown
    assert "\x1b" not in shown and shown.count("Hi") == shown.count("And now?") == 1
    assert r"\x1b[2J" in shown.partition("And now?")[2]


def _until(terminal: int, text: str) -> str:
    """Return what a terminal shows until `text`."""
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 1)
    return shown.decode()


def test_an_interrupted_answer_stays_in_the_conversation(endless: Project) -> None:
    """As far as it was written. Elsewhere than in a terminal, Ctrl-C ends the chat."""
    from zerolora.chatting.conversation import ChatModel, chat
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(endless.directory)
        model = ChatModel("default", resolve(load(Path("config/config.yaml"))), 100_000)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if text == "J" and written.count("J") % 2 == 0:
            raise KeyboardInterrupt

    chat([model], ["Hi"], write, live=True, interruptible=True)
    answer = {"role": "assistant", "content": CLEARS + CLEARS[:-1]}
    assert model.messages == [{"role": "user", "content": "Hi"}, answer]
    chat([model], ["So"], write, live=True, interruptible=True)
    assert model.messages[2:] == [{"role": "user", "content": "So"}, answer]
    before, written[:] = model.messages, []
    with pytest.raises(KeyboardInterrupt):
        chat([model], ["Go"], write, live=True)
    assert model.messages == before


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_answered_with_the_reason(project: Project, errors: str) -> None:
    """With each way in which Python reads such lines, by the locale. (Loads a model.)"""
    reads = f"import sys; sys.stdin.reconfigure(encoding='utf-8', errors={errors!r})"
    ended = chat(project, "default", "--max-new-tokens", "4", lines=b"\xff\nHi\n", before=reads)
    first, second = ended.stdout.splitlines()
    assert ended.returncode == 0 and first.startswith("(the question contains half a character ('\\udcff', at 1)")
    assert second and not second.startswith("(")
