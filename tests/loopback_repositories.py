"""A hub on 127.0.0.1 whose repositories can be made, written and read: as much of the real one as its client asks for.

Large files go the way of Git LFS, which the client takes with HF_HUB_DISABLE_XET=1; there is no Xet storage here.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf")
LICENCES = {"apache-2.0", "mit", "other"}
ROUTE = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/(.+))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Request(NamedTuple):
    """The requests."""

    method: str
    path: str
    token: str | None


class Repository:
    """Branches, commits (their files by name), and the messages of the commits."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.branches: dict[str, str] = {}
        self.add("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")

    def add(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """Add a commit to a branch."""
        self.messages.append(message)
        commit = hashlib.sha1(json.dumps([len(self.messages), sorted(files)]).encode()).hexdigest()  # noqa: S324
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files of main."""
        return self.commits[self.branches["main"]]


class Repositories(http.server.ThreadingHTTPServer):
    """The hub. `token` is the one that may write; `mine` its owner.

    refusals: for the start of a path, the answers that the next requests get in its place: status, error code.
    meanwhile: called before a commit is made. stalls: large files are awaited for ever; `stalled` tells of the first.
    """

    def __init__(self, token: str, mine: str = "me") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.mine = token, mine
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.refusals: dict[str, list[tuple[int, str | None]]] = {}
        self.meanwhile: Any = None
        self.stalls, self.stalled, self.released = False, threading.Event(), threading.Event()
        self.asked: list[Request] = []

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def written(self) -> list[Request]:
        """Return the requests that change something."""
        return [asked for asked in self.asked if asked.method == "PUT" or "/commit/" in asked.path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Repositories

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        self.server.asked.append(Request(self.command, path, token))
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        for start, refusals in self.server.refusals.items():
            if path.startswith(start) and refusals:
                status, code = refusals.pop(0)
                message = f"refused: {self.server.endpoint}{self.path}" if path.startswith("/lfs/") else "refused"
                self._answer({"error": message}, status, {"X-Error-Code": code} if code else {})
                return
        if path.startswith("/lfs/"):
            self._large_file(path.removeprefix("/lfs/"), body)
        elif token not in (None, self.server.token):
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body), token)
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := RESOLVE.fullmatch(path):
            self._resolve(*match.groups())
        elif match := ROUTE.fullmatch(path):
            self._of_repository(match[1], match[2], match[3] or "main", body, token)
        else:
            self._answer({}, 404)

    def _create(self, wanted: dict[str, Any], token: str | None) -> None:
        if token is None or wanted["organization"] != self.server.mine:
            self._answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.server.repositories:
            self._answer({"error": "You already created this model repo"}, 409)
            return
        self.server.repositories[name] = Repository(wanted.get("visibility") == "private")
        self._answer({"url": f"{self.server.endpoint}/{name}"})

    def _validate(self, content: str) -> None:
        import yaml

        card = yaml.safe_load(content.split("---\n")[1])
        errors = [] if card["license"] in LICENCES else [{"message": '"license" must be one of [apache-2.0, mit]'}]
        if "base_model" in card and not re.fullmatch(r"[\w.-]+/[\w.-]+", card["base_model"]):
            errors.append({"message": '"base_model" is not valid'})
        self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for each in wanted["objects"]:
            actions = {"upload": {"href": f"{self.server.endpoint}/lfs/{each['oid']}?signature=secret"}}
            objects.append(each | ({} if each["oid"] in self.server.stored else {"actions": actions}))
        self._answer({"transfer": "basic", "objects": objects})

    def _large_file(self, oid: str, body: bytes) -> None:
        if self.server.stalls:
            self.server.stalled.set()
            self.server.released.wait()
            self.close_connection = True
            return
        if self.command != "PUT":
            self._send(self.server.stored[oid])
        elif hashlib.sha256(body).hexdigest() == oid:
            self.server.stored[oid] = body
            self._answer({})
        else:
            self._answer({"error": "other bytes"}, 400)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.server.repositories[name]
        commit = repository.branches.get(revision, revision)
        if path not in repository.commits[commit]:
            self._answer({}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        data = repository.commits[commit][path]
        self._send(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit})

    def _of_repository(self, name: str, what: str | None, revision: str, body: bytes, token: str | None) -> None:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and token is None):
            self._answer({"error": "Repository not found"}, 404 if token else 401, {"X-Error-Code": "RepoNotFound"})
            return
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = repository.commits[commit]
        if what in (None, "revision"):
            self._answer({"id": name, "modelId": name, "sha": commit, "private": repository.private})
        elif what == "tree":
            self._answer([_entry(path, data) for path, data in files.items()])
        elif token is None or name.split("/", maxsplit=1)[0] != self.server.mine:
            self._answer({"error": "You need write access"}, 403)
        elif what == "preupload":
            wanted = json.loads(body)["files"]
            self._answer({"files": [_mode(each["path"], files) for each in wanted]})
        else:
            self._commit(name, repository, revision, [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        if self.server.meanwhile:
            self.server.meanwhile(repository)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.branches[branch]):
            self._answer({"error": "The branch has moved"}, 412)
            return
        files = dict(repository.commits[repository.branches[branch]])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            else:
                del files[value["path"]]
        commit = repository.add(branch, files, header["summary"])
        self._answer({"commitUrl": f"{self.server.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), headers, status)

    def _send(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _is_large(path: str) -> bool:
    return path.endswith(LARGE)


def _oid(path: str, data: bytes) -> str:
    if _is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Return how a file is to be uploaded, and the hash of the one that is there."""
    mode = "lfs" if _is_large(path) else "regular"
    return {
        "path": path,
        "uploadMode": mode,
        "shouldIgnore": False,
        "oid": _oid(path, files[path]) if path in files else None,
    }


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _oid(path, data)}
    if _is_large(path):
        entry["lfs"] = {"oid": _oid(path, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def serving(hub: Repositories) -> Iterator[Repositories]:
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
