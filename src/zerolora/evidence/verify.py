"""`zerolora verify`: the files of a published directory against its statements, and their signatures, offline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from zerolora.errors import UserError, explained, printable, shown
from zerolora.evidence import envelope, rebuilt, sigstore_bundle, ssh_signature
from zerolora.evidence.envelope import StatementFile
from zerolora.evidence.rebuilt import headline
from zerolora.evidence.sigstore_bundle import Identity
from zerolora.evidence.statement import PROVENANCE, REMEDY, Digests, SubjectKeys
from zerolora.files import MANIFEST, sha256
from zerolora.json_kinds import JsonObject, PathBelow, check
from zerolora.units import counted

FOLDER = "statements"
CARD = "README.md"
MOST = 1000
"""Statements of a directory that are read."""
Word = Literal["verified", "untrusted", "unsigned", "wrong"]


class Trust(NamedTuple):
    """Whose signatures the user trusts."""

    allowed: Path | None = None
    """An allowed_signers file of SSH."""
    identities: tuple[Identity, ...] = ()

    @classmethod
    def of(cls, allowed: Path | None, identities: Sequence[str]) -> "Trust":
        """Return the trust in an allowed_signers file and in identities, each NAME=ISSUER. Raises UserError for
        another form, or if there is no such file."""
        if allowed and not allowed.is_file():
            raise UserError(f"--allowed-signers {allowed}: there is no such file; see ssh-keygen(1), ALLOWED SIGNERS")
        named = []
        for each in identities:
            name, separator, issuer = each.partition("=https://")
            if not separator or not name or not issuer:
                raise UserError(
                    f"--identity {shown(each)}: use NAME=ISSUER, as me@example.org=https://issuer.example.org"
                )
            named.append(Identity(name, f"https://{issuer}"))
        return cls(allowed, tuple(named))

    @property
    def is_given(self) -> bool:
        """Return whether the user named anybody."""
        return self.allowed is not None or bool(self.identities)


class Signer(NamedTuple):
    """Who signed a statement, as far as that is known here."""

    word: Word
    about: str


class Finding(NamedTuple):
    """A line of the result. `untrusted`: a valid signature by a key that the user did not name."""

    word: Word
    what: str

    def __str__(self) -> str:
        # Names of files and of machines are a stranger's: a line break in one would begin another finding.
        return printable(f"{self.word:9} {self.what}")


class DetailsOfRun(JsonObject):
    """What SLSA calls the details of a build's run."""

    byproducts: list[SubjectKeys] = Field([])


class ProvenanceKeys(JsonObject):
    """SLSA's provenance, as far as it names files of the directory."""

    runDetails: DetailsOfRun


def signer_of(file: StatementFile, trust: Trust) -> Signer:
    """Check the signatures of a statement and return who signed it."""
    if file.form == "plain":
        return Signer("unsigned", "not signed")
    if file.form == "sigstore":
        return _sigstore_signer(file, trust)
    content, valid = envelope.encoded(file.payload), {}
    for signature in file.signatures:
        key = ssh_signature.fingerprint(signature)
        if key is None:
            continue  # another tool's, whose key nothing here names
        if not ssh_signature.is_valid(content, signature):
            return Signer("wrong", f"its signature is not one of this statement by the key {key}")
        valid[key] = signature
    # One that is not valid is wrong in any place, so the order of the signatures decides nothing.
    allowed = trust.allowed
    for key, signature in valid.items() if allowed else ():
        assert allowed
        if name := ssh_signature.signer(content, signature, allowed):
            return Signer("verified", f"signed by {name}, {key}")
    if not valid:
        return Signer("untrusted", "signed by a key of another kind than SSH's, which is not checked")
    return Signer("untrusted", f"signed by {', '.join(valid)}")


def _sigstore_signer(file: StatementFile, trust: Trust) -> Signer:
    if why := sigstore_bundle.missing():
        return Signer("untrusted", f"signed by sigstore, which is not checked: {why}")
    try:
        name, trusted = sigstore_bundle.signer(file.text, file.payload, trust.identities)
    except sigstore_bundle.InvalidSignatureError as error:
        return Signer("wrong", f"its signature by sigstore is not valid ({error})")
    return Signer("verified" if trusted else "untrusted", f"signed by {name} through sigstore")


def verify(directory: Path, trust: Trust) -> tuple[list[Finding], str | None]:
    """Compare a directory with its statements and check their signatures; nothing is asked of a network.

    Return what was found, and what the rebuilds say together that are signed by whom the user trusts, or by anybody if
    the user named nobody. If the user named somebody, a builder's statement without such a signature is wrong.

    Raises UserError if there is no such directory, or it has no statements.
    """
    paths, hashes = statement_paths(directory), _hashes(directory)
    findings: list[Finding] = []
    signed: list[tuple[Path, StatementFile, Signer]] = []
    stated: dict[str, str] = {}
    model: dict[str, str] = {}
    builders, rebuilds = [], []

    def wrong(error: UserError | OSError) -> Finding:
        text = explained(error) if isinstance(error, OSError) else str(error)
        return Finding("wrong", text.removeprefix(f"{directory}/"))

    for path in paths:
        try:
            file = envelope.read(path)
            if (signer := signer_of(file, trust)).word == "wrong":
                raise UserError(f"{path}: {signer.about}; {REMEDY}")
            signed.append((path, file, signer))
        except (UserError, OSError) as error:
            findings.append(wrong(error))
    # The builder's first: they say which files rebuilds are to be about.
    for path, file, signer in sorted(signed, key=lambda each: each[1].statement.kind != PROVENANCE):
        name = path.relative_to(directory)
        try:
            if file.statement.kind == PROVENANCE:
                files = _files_of_builder(file, path, hashes)
                different = _different(files, hashes, name)
                findings += different
                # If the user named somebody, a stranger's statement does not vouch for added files.
                if signer.word == "verified" or not trust.is_given:
                    stated |= files
                    model |= {name: hashes.get(name, "") for name in file.statement.subjects}
                builders.append(signer.word)
                about = f"{len(files) - len(different)} of {counted(len(files), 'file')} as built"
            else:
                rebuild = rebuilt.read(file.statement, path)
                rebuild.check_about(stated or hashes, path)
                if rebuild.has_weights_of(hashes) and (signer.word == "verified" or not trust.is_given):
                    rebuilds.append(rebuild)
                about = f"rebuilt on {rebuild.machine}: {rebuild.verdict} ({rebuild.equal_among(model or hashes)})"
            findings.append(Finding(signer.word, f"{name}: {about}; {signer.about}"))
        except UserError as error:
            findings.append(wrong(error))
    nobody = "no statement by whom you named" if trust.is_given else "no statement"
    if not builders:
        findings.append(Finding("wrong", f"{FOLDER}: has no statement of the builder; get the directory again"))
    elif trust.is_given and "verified" not in builders:
        findings.append(Finding("wrong", f"{FOLDER}: nobody whom you named signed the builder's statement"))
    else:
        findings += [Finding("wrong", f"{name}: {nobody} names it") for name in sorted(hashes.keys() - stated)]
    return findings, headline(rebuilds)


def statement_paths(directory: Path) -> list[Path]:
    """Return the files of a directory's statements. Raises UserError if there are none, or too many."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; give one that `zerolora push` wrote")
    folder = directory / FOLDER
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    if not paths:
        raise UserError(f"{folder}: there are no statements; `zerolora push` writes them beside a model")
    if len(paths) > MOST:
        raise UserError(f"{folder}: has {len(paths):,} files; at most {MOST:,} statements are read")
    return paths


def _hashes(directory: Path) -> dict[str, str]:
    """Return the sha256 of the files that a builder's statement must name, by name: all but statements, card, manifest,
    and what git and the hub's client keep in names that begin with a dot. Empty for what has no bytes to compare: a
    link to a directory or to nothing, a pipe."""
    result = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        is_file = path.is_file()
        is_folder = path.is_dir() and not path.is_symlink()
        own = name.parts[0] == FOLDER or (is_file and name.as_posix() in (CARD, MANIFEST))
        if not is_folder and not own and not name.parts[0].startswith("."):
            result[name.as_posix()] = sha256(path) if is_file else ""
    return result


def _files_of_builder(file: StatementFile, path: Path, hashes: Digests) -> Digests:
    """Return the sha256 of the files that a builder's statement names, its by-products too. Raises UserError if none of
    them is here."""
    found = file.statement
    check(found.predicate, ProvenanceKeys, path, REMEDY)
    files = dict(found.subjects)
    for each in found.predicate["runDetails"].get("byproducts", []):
        name, digest = each["name"], each["digest"]["sha256"]
        if files.setdefault(name, digest) != digest:
            raise UserError(f"{path}: has two digests of {shown(name)}; {REMEDY}")
    check({"subject": files}, dict[str, dict[PathBelow, str]], path, REMEDY)
    if not set(hashes.values()) & set(files.values()):
        raise UserError(f"{path}: is a statement of another model: none of its files is here; {REMEDY}")
    return files


def _different(files: Digests, hashes: Digests, by: Path) -> list[Finding]:
    """Return a line for each file that is missing or has other bytes."""
    result = []
    for name, digest in sorted(files.items()):
        if name not in hashes:
            result.append(Finding("wrong", f"{name}: is missing; {by} names it"))
        elif not hashes[name]:
            result.append(Finding("wrong", f"{name}: is no file, but a link to none or a pipe; {by} names it"))
        elif hashes[name] != digest:
            result.append(Finding("wrong", f"{name}: has sha256 {hashes[name][:12]}; {by} says {digest[:12]}"))
    return result
