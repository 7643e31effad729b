"""A hub of one repository on 127.0.0.1: the part of the API that the client uses, and its failures."""

import hashlib
import http.server
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from conftest import served

REPOSITORY = "some/data"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PAGE = 3
REPOSITORIES = re.compile(rf"^(?:/datasets|/models)?/{REPOSITORY}/")


class Asked(NamedTuple):
    """A request: unquoted path, no query."""

    method: str
    path: str
    token: str | None
    range: str | None


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files`; those in `large` like Git LFS, from another URL. Attributes simulate failures.

    card: the metadata of its README.md. listed: the listing shows sizes and hashes of these files. xet: large files are
    missing in Xet storage.
    token: required for files. private: required for the listing, too.
    refusal: status and error code of an answer without the token. failures: of the next downloads, in order:
    "break" (closes the connection half way), "reset" (resets it), "error" (status 500), "stall" (waits half way until
    `released` is set).
    """

    def __init__(self, files: dict[str, bytes], large: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.large = files, large
        self.listed: dict[str, bytes] = {}
        self.card: dict[str, Any] = {}
        self.xet = False
        self.token: str | None = None
        self.private = False
        self.refusal: tuple[int, str | None] = (401, "GatedRepo")
        self.failures: list[str] = []
        self.stalled, self.released = threading.Event(), threading.Event()
        self.asked: list[Asked] = []

    @property
    def endpoint(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """Return the sorted names of the requested files."""
        resolve = f"/resolve/{REVISION}/"
        return sorted({asked.path.partition(resolve)[2] for asked in self.asked if resolve in asked.path})

    def handle_error(self, *_: Any) -> None:
        """Print nothing: tests end clients early."""


def asking(hub: Hub, folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `zerolora` with the hub in `folder`, where its client keeps its files too."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_TOKEN": "", "HF_HUB_OFFLINE": ""}
    return served("zerolora", *arguments, directory=folder, **own | variables)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        # Of the default branch.
        path = re.sub(rf"^(/api/(?:models|datasets)/{REPOSITORY})(/revision/main)?$", rf"\1/revision/{REVISION}", path)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        self.server.asked.append(Asked(self.command, path, token, self.headers["Range"]))
        kind, _, rest = REPOSITORIES.sub("", path.removeprefix("/api"), count=1).partition("/")
        revision, _, name = rest.partition("/")
        may = self.server.token in (None, token)
        if path.startswith("/lfs/"):
            self.send_file(path.removeprefix("/lfs/"))
        elif "/reconstructions/" in path:
            self.answer(404, {})
        elif kind not in ("tree", "resolve", "revision", "xet-read-token"):
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        elif revision != REVISION:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif not may and (kind != "tree" or self.server.private):
            status, code = self.server.refusal
            self.answer(status, {"X-Error-Message": "Terms first"} | ({"X-Error-Code": code} if code else {}))
        elif kind == "revision":
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            about = {"id": REPOSITORY, "sha": REVISION, "siblings": siblings, "cardData": self.server.card}
            self.answer(200, {}, json.dumps(about).encode())
        elif kind == "tree":
            self.send_tree(int(parse_qs(url.query).get("cursor", ["0"])[0]))
        elif kind == "xet-read-token":
            headers = {"X-Xet-Cas-Url": self.server.endpoint, "X-Xet-Access-Token": "pass"}
            self.answer(200, headers | {"X-Xet-Token-Expiration": str(int(time.time()) + 3600)})
        elif name in self.server.large:
            self.redirect(name)
        elif name in self.server.files:
            self.send_file(name)
        else:
            self.answer(404, {"X-Error-Code": "EntryNotFound"})

    def send_tree(self, first: int) -> None:
        """Answer with a page of the listing: folders and files."""
        entries: list[dict[str, Any]] = []
        for folder in {name.rpartition("/")[0] for name in self.server.files} - {""}:
            entries.append({"type": "directory", "path": folder, "size": 0, "oid": "0" * 40})
        for name, data in (self.server.files | self.server.listed).items():
            entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}  # noqa: S324
            if name in self.server.large:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                entry |= {"xetHash": hashlib.sha256(data).hexdigest()} if self.server.xet else {}
            entries.append(entry)
        more = {}
        if first + PAGE < len(entries):
            more["Link"] = f'<{self.server.endpoint}{self.path.partition("?")[0]}?cursor={first + PAGE}>; rel="next"'
        self.answer(200, more, json.dumps(entries[first : first + PAGE]).encode())

    def redirect(self, name: str) -> None:
        """Redirect to the URL of a large file."""
        data = self.server.files[name]
        headers = {"Location": f"{self.server.endpoint}/lfs/{quote(name)}", "X-Repo-Commit": REVISION}
        headers |= {"X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        self.answer(302, headers)

    def send_file(self, name: str) -> None:
        """Answer with a file from the requested byte on, or with the next failure."""
        data = self.server.files[name]
        failure = self.server.failures.pop(0) if self.command == "GET" and self.server.failures else None
        if failure == "error":
            self.answer(500, {})
            return
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": REVISION}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        part = data[start:]
        if not failure:
            self.answer(206 if start else 200, headers, part)
            return
        self.send_head(206 if start else 200, headers | {"Content-Length": str(len(part))})
        self.wfile.write(part[: len(part) // 2])
        self.close_connection = True
        if failure == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if failure == "stall":
            self.server.stalled.set()
            self.server.released.wait()

    def answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        """Send an answer with its length."""
        self.send_head(status, headers | {"Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send status and headers."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends."""
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    hub.daemon_threads = True
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


def use(client: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point huggingface_hub at this endpoint."""
    client.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    client.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    client.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
