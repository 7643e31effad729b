"""`zerolora serve` with transformers' own server and OpenAI's own client, over the loopback."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, Project, project_environment
from package_folder import SERVING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(SERVING.missing() is not None, reason=SERVING.missing() or ""),
]
CLIENT = """
import json, sys
from openai import OpenAI
address, model, tokens, *questions = sys.argv[1:]
client = OpenAI(base_url=address, api_key="none")
for question in questions:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=int(tokens), temperature=0)
    print(json.dumps([answer.choices[0].message.content, answer.usage.prompt_tokens]))
"""


@pytest.fixture(scope="module")
def project(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended."""
    return copy_finished("serve")


@pytest.fixture
def port() -> int:
    """Return a free port that the system gives to no other process: below Linux's ip_local_port_range."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as listener:
            number = random.randrange(20_000, 32_000)  # noqa: S311 (not a secret)
            listener.bind(("127.0.0.1", number))
            return number


def environment_of(project: Project) -> dict[str, str]:
    environment = project_environment(project.directory)
    return environment | {"PYTHONPATH": os.pathsep.join([str(SERVING.folder), environment.get("PYTHONPATH", "")])}


def serving(project: Project, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [BIN / "zerolora", "serve", *arguments],
        cwd=project.directory,
        env=environment_of(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(server: "subprocess.Popen[str]", port: int) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert json.load(answer) == {"status": "ok"}
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server ended: {server.stdout and server.stdout.read()}")


@pytest.fixture
def served(project: Project, port: int) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Return a function that serves a model at `port`; the server ends with the test."""
    servers: list[subprocess.Popen[str]] = []

    def serve(name: str) -> "subprocess.Popen[str]":
        servers.append(serving(project, name, "--port", str(port)))
        wait_for(servers[-1], port)
        return servers[-1]

    yield serve
    for server in servers:
        server.kill()
        server.communicate()


def ended(server: "subprocess.Popen[str]") -> str:
    """Return the rest of a server's output once all its processes have closed it."""
    assert server.stdout
    output = server.stdout.read()
    server.wait()
    return output


def asked(port: int, content: str, **options: Any) -> tuple[int, Any]:
    """Return the status and the body of an answer."""
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": content}], **options}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310 (of this file)
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def check_bounds(port: int, question: str, context: int) -> None:
    """Ask a server for more than its model takes, while others ask it."""
    with ThreadPoolExecutor(8) as clients:
        large = [clients.submit(asked, port, text) for text in ("12 + " * 200_000, "\x00é" * 2_000_000)]
        small = [clients.submit(asked, port, question, temperature=0, max_tokens=4) for _ in range(4)]
        done, _ = wait([*large, *small], return_when=FIRST_COMPLETED)
        answers = [each.result() for each in small]
        refusals = [each.result() for each in large]
    assert done & {*small}, "a long prompt was in the way of short ones"
    texts = {json.dumps(answer["choices"][0]["message"]) for status, answer in answers if status == 200}
    assert len(texts) == 1 and [status for status, _ in answers] == [200] * 4
    most = f"the model takes {context:,} with its answer: send a shorter prompt"
    for status, refusal in refusals:
        assert status == 400 and refusal["detail"].startswith("the request has ")
        assert refusal["detail"].endswith(f"; {most}") and "\n" not in refusal["detail"]
    # With the template's own tokens it does not fit; an answer ends where the context does.
    status, refusal = asked(port, "1" * (context - 1))
    assert (status, refusal["detail"].partition("; ")[2]) == (400, most)
    status, answer = asked(port, "1" * (context - 100), max_tokens=10_000)
    assert status == 200 and answer["usage"]["total_tokens"] <= context


@pytest.mark.parametrize("part", ["", "/adapter"])
def test_a_client_gets_the_answers_of_the_evaluation(
    part: str, project: Project, port: int, served: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    """With the same tokens in the prompt. (A server loads libraries and a model.) SIGTERM ends both processes, and
    leaves no directory. Several ask at once; a prompt that the model cannot take is refused and blocks none."""
    results = project.directory / "results"
    rows = json.loads((results / "default/answers.json").read_text())[:2]
    server = served(f"default{part}")
    command = [BIN / "python", "-c", CLIENT, f"http://127.0.0.1:{port}/v1", f"default{part.replace('/', '-')}", "4"]
    client = subprocess.run(
        [*command, *(row["question"] for row in rows)],
        env=environment_of(project), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert client.returncode == 0, client.stderr
    answered = [json.loads(line) for line in client.stdout.splitlines()]
    assert answered == [[row["answer"], row["prompt_tokens"]] for row in rows]
    if not part:
        check_bounds(
            port,
            rows[0]["question"],
            json.loads((project.directory / "model/config.json").read_text())["max_position_embeddings"],
        )
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    folder = Path(f"/proc/{child}/cwd").readlink()
    server.send_signal(signal.SIGTERM)
    output = ended(server)
    assert server.returncode == 0, output
    assert f"at http://127.0.0.1:{port}/v1" in output and not folder.exists() and not Path(f"/proc/{child}").exists()


def test_a_server_that_dies_is_an_error(
    project: Project, port: int, served: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    """As for lack of memory. (A server loads libraries and a model.)"""
    server = served("default")
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    output = ended(server)
    assert server.returncode == 2, output
    assert "transformers' server of default was killed by SIGKILL; give it more memory, and run this again" in output


def test_the_system_prompt_of_training_is_in_the_template(project: Project, tmp_path: Path) -> None:
    """As `prepare` adds it: only to a conversation that has none."""
    from zerolora.chatting.model_server import write_served
    from zerolora.data.template import Template
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.model.architecture import tokenizer_of

    from zerolora.config.file import load  # isort: skip
    from zerolora.config.resolve import resolve  # isort: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.directory)
        prepared = resolve(load(Path("config/config.yaml"))).prepare["rows"].model_copy(update={"system": 'Say "no".'})
        base, data = (project.directory / name for name in ("model", "results/data/rows"))
        write_served(tmp_path / "served", EvaluatedModel(base), data, prepared.system)
    template, tokenizer = Template(tokenizer_of(base), prepared), tokenizer_of(tmp_path / "served")
    user = {"role": "user", "content": "Hi"}
    for system in (prepared.system, "Be brief."):
        whole = [{"role": "system", "content": system}, user]
        sent = [user] if system == prepared.system else whole
        text = tokenizer.apply_chat_template(sent, tokenize=False, add_generation_prompt=True)
        assert text == template.write(whole, prompt=True)


def test_a_taken_port_and_missing_packages_are_refused(project: Project, port: int) -> None:
    """Before a model is loaded."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        output, _ = (refused := serving(project, "default", "--port", str(port))).communicate()
    assert refused.returncode == 2 and f"--port {port}: Address already in use; choose another --port" in output
    own: dict[str, Any] = {"cwd": project.directory, "env": project_environment(project.directory)}
    ended = subprocess.run([BIN / "zerolora", "serve", "default"], capture_output=True, text=True, check=False, **own)
    assert ended.returncode == 2 and "install the extra: `pip install 'zerolora[serve]'`" in ended.stderr
