"""`zerolora push`: push a finished run's model, with a model card, to a hub repository or a directory.

zerolora push --run default --what adapter --to OWNER/NAME
"""

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.evidence import signing
from zerolora.evidence.verify import CARD, FOLDER
from zerolora.files import MANIFEST, read_object, sha256, staged_directory, write_text
from zerolora.log import result
from zerolora.model.manifest import BASE
from zerolora.publish import croissant, run_crate
from zerolora.publish.card import model_card
from zerolora.publish.finished import PUSH, RESULTS, FinishedRun, PushedModel, finished_run, product_of
from zerolora.publish.hub import HubTarget, check_repository, push_to_hub
from zerolora.publish.rebuild_statements import BUILDERS, rebuild_statements
from zerolora.publish.record import RECORD, as_text, record_of, with_files
from zerolora.publish.slsa_provenance import builder_statement
from zerolora.units import byte_size

DIRECTORIES = ("/", "./", "../")
"""Prefixes of the path of a directory."""
HUB = "hf://"


def push(
    run: str,
    what: str,
    to: str,
    revision: str | None,
    private: bool,
    message: str | None,
    sign: str | None = None,
    include: Collection[str] = (),
) -> str:
    """Push a run's adapter or merged model; return REPOSITORY@COMMIT, or the directory.

    `sign`: a key of SSH, or "sigstore", that signs the statement of what it was made from; `include`: rows,
    checkpoints, for a rebuild. A push of the same files changes nothing. Raises UserError, before anything is sent, if
    the run is unfinished or out of date, or a file differs from the stage's manifest.
    """
    directory = _directory(to)
    if directory is not None and (revision or private or message):
        raise UserError(f"--to {to}: is a directory; --revision, --private and --message are for a repository")
    repository = to.removeprefix(HUB)
    if directory is None:
        check_repository(repository)
    finished = finished_run(run)
    record = record_of(finished)
    model = product_of(finished, what)
    product = with_files(model, record, include)
    title = directory.resolve().name if directory else repository
    written = as_text(record)
    texts = product.rewritten | _evidence(finished, product, written, title, sign, directory is None, revision)
    texts[MANIFEST] = _manifest(product, texts, run)
    size = f"{len(product.files | texts)} files, {byte_size(product.bytes)}"
    if directory is not None:
        new = _push_to_directory(product, texts, directory)
        result(f"{size} in {directory}" if new else f"nothing to do: {directory} is up to date")
        return str(directory)
    target = HubTarget(repository, revision, private)
    commit, address, new = push_to_hub(product, texts, target, message or f"Push {what} of run {run}")
    result(f"{size} in {address}" if new else f"no new commit: {repository} is up to date, at {commit}")
    return f"{repository}@{commit}"


def _directory(to: str) -> Path | None:
    """Return the directory of --to, None if it is a repository. Raises UserError if it is ambiguous."""
    if to in (".", "..") or to.startswith(DIRECTORIES):
        return Path(to)
    if not to.startswith(HUB) and Path(to.split("/", maxsplit=1)[0]).exists():
        raise UserError(f"--to {to}: use ./{to} for the directory, or {HUB}{to} for the repository")
    return None


def _evidence(
    run: FinishedRun,
    product: PushedModel,
    record: str,
    title: str,
    sign: str | None,
    is_repository: bool,
    branch: str | None,
) -> dict[str, str]:
    """Return the card, the descriptions, among them the record, and the statements of the builder and of rebuilds, by
    name."""
    rebuilds = rebuild_statements(product.hashes)
    described = {RECORD: record, croissant.NAME: croissant.croissant(run)}
    if crate := run_crate.run_crate(run, product, title):
        described[run_crate.NAME] = crate
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in described.items()}
    statement, signer = signing.signed(builder_statement(run, product, digests), sign)
    card = model_card(run, product, title, repository=is_repository, branch=branch, builder=signer, rebuilds=rebuilds)
    statements = {BUILDERS: statement} | {each.name: each.text for each in rebuilds}
    return {CARD: card, **described, **{f"{FOLDER}/{name}": text for name, text in statements.items()}}


def _manifest(product: PushedModel, texts: dict[str, str], run: str) -> str:
    """Return the manifest to push: later pushes recognize their files by it, and anyone can verify them."""
    own = {
        name: {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text.encode())}
        for name, text in texts.items()
    }
    value: dict[str, Any] = {BASE: product.base, "files": product.files | own, PUSH: {"run": run, "what": product.kind}}
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def _push_to_directory(product: PushedModel, texts: dict[str, str], target: Path) -> bool:
    """Replace directory `target` by the product's files and `texts`, by name. Return False if it is up to date.

    Raises UserError if the directory has other files.
    """
    if target.resolve().is_relative_to(RESULTS.resolve()):
        raise UserError(f"--to {target}: {RESULTS} belongs to the pipeline; choose a directory outside it")
    earlier = (target / MANIFEST).is_file() and PUSH in (manifest := read_object(target / MANIFEST, "zerolora push"))
    if target.exists() and not earlier and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"--to {target}: already exists, and no push wrote it; name another directory, or remove it")
    if earlier and manifest == json.loads(texts[MANIFEST]):
        files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} - {MANIFEST}
        expected = manifest["files"]
        if files == expected.keys() and all(sha256(target / name) == expected[name]["sha256"] for name in files):
            return False
    with staged_directory(target) as staged:
        for name in product.files.keys() - texts.keys():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(product.path(name), staged / name)
        for name, text in texts.items():
            write_text(staged / name, text)
    return True
