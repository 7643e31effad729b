"""As much of a Hugging Face hub as a download at a fixed commit asks for, on the loopback address."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A dataset repository some/data of the files in a directory. `asked` are the paths that were asked for."""

    def __init__(self, files: Path) -> None:
        self.files, self.asked = files, list[str]()
        self.gated = False
        self.breaks: str | None = None  # the file at which the connection breaks
        self.endpoint = ""


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append(path)
        files = {file.relative_to(self.hub.files).as_posix(): file for file in self.hub.files.rglob("*")}
        files = {name: file for name, file in files.items() if file.is_file()}
        if not path.startswith(("/api/datasets/some/data", "/datasets/some/data")):
            self.refuse(404, "RepoNotFound")
        elif self.hub.gated:
            self.refuse(403, "GatedRepo")
        elif REVISION not in path:
            self.refuse(404, "RevisionNotFound")
        elif path == f"/api/datasets/some/data/revision/{REVISION}":
            siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
            self.answer(json.dumps({"id": "some/data", "sha": REVISION, "siblings": siblings}).encode())
        elif path.startswith(f"/api/datasets/some/data/tree/{REVISION}"):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        else:
            name = path.removeprefix(f"/datasets/some/data/resolve/{REVISION}/")
            if name in files:
                self.answer(files[name].read_bytes(), breaks=name == self.hub.breaks)
            else:
                self.refuse(404, "EntryNotFound")

    def answer(self, content: bytes, breaks: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if breaks else content)

    def refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def hub_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the environment in which the real client talks to this hub, as nobody in particular."""
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "home"), "HF_TOKEN": ""}


@contextlib.contextmanager
def serve(files: Path) -> Iterator[Hub]:
    """Run a hub with the files of a directory; `endpoint` is its address."""
    hub = Hub(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
