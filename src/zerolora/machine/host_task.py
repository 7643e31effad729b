"""A command on a host of a list, started by hosts.py over ssh: python -I host_task.py

The first line of stdin is a JSON object: what to check, or the command. Each further line is the name of a signal for
the command. When stdin ends, the connection or the process that started it has ended: the command gets SIGTERM, and
SIGKILL after GRACE_SECONDS.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL, for commands that save their state first (train/launch/launcher.py)."""


def main() -> int:
    """Answer a check, or run the command and return its exit code."""
    request = json.loads(sys.stdin.buffer.readline())
    if "folder" in request:
        print(json.dumps(checked(request)), flush=True)
        return 0
    return run(request["command"], request["folder_of_command"], os.environ | request["environment"])


def checked(request: dict[str, Any]) -> dict[str, Any]:
    """Return whether this host sees a folder's file and resolves the first host, and a free port."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    try:
        socket.getaddrinfo(request["address"], None)
        resolves = True
    except OSError:
        resolves = False
    file = os.path.join(request["folder"], request["file"])  # noqa: PTH118 (loads faster)
    return {"sees": os.path.isfile(file), "resolves": resolves, "port": port}  # noqa: PTH113


def run(command: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a command and pass signals on to it; return its exit code, as a shell has it."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_pass_on, args=[process], daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _pass_on(process: "subprocess.Popen[bytes]") -> None:
    for line in sys.stdin.buffer:
        process.send_signal(signal.Signals[line.decode().strip()])
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    # Not sys.exit, which would wait for the thread that reads stdin.
    os._exit(main())
