"""`zerolora serve RUN`: transformers' own server for what a run trained, with an API as OpenAI's, on the loopback.

The server gets a directory whose weights are links, with the chat template, the system prompt and the stop tokens of
training. It has no authentication, and loads no other model.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from zerolora.chatting.conversation import named_model
from zerolora.config.settings import Resolved
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.files import MANIFEST, read_object, write_json, write_text
from zerolora.log import LOGGER
from zerolora.methods.peft_format import CONFIG as ADAPTER_CONFIG
from zerolora.model import added_tokens
from zerolora.model.architecture import tokenizer_of
from zerolora.model.prompt_format import write_prompt_format

CHAT_TEMPLATE = "chat_template.jinja"

PACKAGES = ("fastapi", "uvicorn", "openai")
"""Those that transformers' server needs and this project does not (extra `serve`)."""
SERVER = """
import sys
from pathlib import Path
from zerolora.machine.parents import end_at_parents_death
end_at_parents_death()
from zerolora.compat.left_out import leave_out
leave_out("torchao")
from zerolora.chatting.prompt_bounds import bound_prompts
bound_prompts(Path(sys.argv[2]))
from transformers.cli.transformers import main
main()
"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(name: str, resolved: Resolved, host: str, port: int) -> None:
    """Serve a model of a run until it is stopped.

    Raises UserError, before anything is loaded, if the run lacks the model, a package is missing, or the port is taken;
    and if the server ends by itself.
    """
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise UserError(
            f"transformers' server needs {' and '.join(missing)}; install the extra: `pip install 'zerolora[serve]'`"
        )
    named = named_model(name, resolved)
    _check_free(host, port)
    label = name.replace("/", "-")
    with tempfile.TemporaryDirectory(prefix="zerolora-serve-") as folder:
        write_served(Path(folder) / label, named.model, named.data, named.prepared.system)
        if host not in LOOPBACK:
            LOGGER.warning(f"--host {host}: anyone who reaches this address can use the model; there is no password")
        LOGGER.info(f"serving {name} as model {label} at http://{host}:{port}/v1")
        # On a CPU in fp32, as in evaluation.
        placed = ["--device", "cpu", "--dtype", "float32"] if named.model.device == "cpu" else ["--device", "auto"]
        command = [sys.executable, "-c", SERVER, "serve", label, "--host", host, "--port", str(port), *placed]
        # The label is a directory below the working directory, so it is no repository of the hub.
        with subprocess.Popen(command, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as server:
            signal.signal(signal.SIGTERM, _stop)
            try:
                code = server.wait()
            except KeyboardInterrupt:  # Ctrl-C, which the server gets too, or SIGTERM
                server.terminate()
                return
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    remedy = "give it more memory" if code == -signal.SIGKILL else "look at its output above"
    raise UserError(f"transformers' server of {name} {how}; {remedy}, and run this again")


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def write_served(target: Path, model: EvaluatedModel, data: Path, system: str) -> None:
    """Write the directory that a server reads: links to the weights, and the prompt format of prepared `data`.

    Raises UserError for a model that such a directory cannot describe.
    """
    source = model.merged or model.base
    _link(source, target)
    if model.merged is None and added_tokens.of_data(data):
        raise UserError(f"{data} adds tokens, which base and adapter get when they are loaded; serve the merged model")
    if adapter := model.loaded_adapter:
        if not (adapter / ADAPTER_CONFIG).is_file():
            raise UserError(f"{adapter}: has whole weights, no adapter; serve the merged model")
        _link(adapter, target)  # beside the base model, from where transformers loads it
        config = read_object(adapter / ADAPTER_CONFIG, "zerolora stage train")
        write_json(target / ADAPTER_CONFIG, config | {"base_model_name_or_path": str(target), "revision": None})
    write_prompt_format(data, target)
    if system:
        write_text(target / CHAT_TEMPLATE, _with_system(target, system))


def _with_system(target: Path, system: str) -> str:
    """Return the chat template of a directory for conversations without a system prompt, which training adds."""
    template = tokenizer_of(target).get_chat_template()
    message = json.dumps({"role": "system", "content": system}, ensure_ascii=False)
    first = '{%- if not messages or messages[0]["role"] != "system" -%}'
    return f"{first}{{%- set messages = [{message}] + messages -%}}{{%- endif -%}}{template}"


def _link(source: Path, target: Path) -> None:
    """Fill a directory with links to weights, and copies of the small files."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if not path.is_file() or path.name == MANIFEST:
            continue
        (target / path.name).unlink(missing_ok=True)
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, target)


def _check_free(host: str, port: int) -> None:
    """Raise UserError if a port cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--host {host} --port {port}: {reason}; choose another --port") from None
