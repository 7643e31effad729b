"""Statements beside a published model: what `zerolora verify` finds, with keys of SSH, and what `attest` writes."""

import base64
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import served

from zerolora.errors import UserError
from zerolora.evidence import envelope, rebuilt, ssh_signature, statement
from zerolora.evidence.machine_words import in_words
from zerolora.evidence.signing import attest, signed
from zerolora.evidence.statement import PROVENANCE, Digests
from zerolora.evidence.verify import Finding, Trust, verify
from zerolora.files import sha256

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="no ssh-keygen: apt-get install openssh-client"
)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BUILDERS, REBUILDERS = "statements/provenance.json", "statements/alice.json"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a key of SSH for each name."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("builder", "alice", "mallory"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return {name: folder / name for name in ("builder", "alice", "mallory")}


@pytest.fixture(scope="session")
def trust(keys: dict[str, Path]) -> Trust:
    """Trust the builder and alice."""
    path = keys["builder"].with_name("allowed_signers")
    names = ("builder", "alice")
    path.write_text("".join(f"{name}@example.org {keys[name].with_suffix('.pub').read_text()}" for name in names))
    return Trust(path)


def product(path: str, original: str | None, rebuilt: str | None, note: str = "") -> dict[str, Any]:
    equal = original is not None and original == rebuilt
    return {"path": path, "original": original, "rebuilt": rebuilt, "note": note, "equal": equal}


def rebuild_json(path: Path, files: Digests, verdict: str = "equal to the byte", **changes: Any) -> Path:
    """Write what `zerolora rebuild` writes, with these products equal."""
    equal = [product(f"results/default/adapter/{name}", each, each) for name, each in files.items()]
    value = {
        "source": "./sums",
        "repository": "/home/alice/sums",
        "version": "0.2.0",
        "machine": "EPYC 9654",
        "verdict": verdict,
        "products": equal,
        "seconds": 12.5,
    }
    path.write_text(json.dumps(value | changes))
    return path


def digests(directory: Path) -> dict[str, str]:
    return {name: sha256(directory / name) for name in (WEIGHTS, CONFIG)}


def builders(files: Digests) -> bytes:
    """Return a builder's statement, as far as `verify` reads it; the real ones are in tests/workflow/test_push.py."""
    return statement.written(files, PROVENANCE, {"runDetails": {"byproducts": []}})


@pytest.fixture
def published(tmp_path: Path, keys: dict[str, Path]) -> Path:
    """Return a directory with an adapter, its builder's statement and alice's, both signed."""
    directory = tmp_path / "sums"
    (directory / "statements").mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(b"weights")
    (directory / CONFIG).write_text("{}")
    (directory / "README.md").write_text("# sums")
    text, _ = signed(builders(digests(directory)), str(keys["builder"]))
    (directory / BUILDERS).write_text(text)
    attest(rebuild_json(tmp_path / "rebuild.json", digests(directory)), directory / REBUILDERS, str(keys["alice"]))
    return directory


def wrong(findings: list[Finding]) -> list[str]:
    return [each.what for each in findings if each.word == "wrong"]


def test_verify_prints_a_line_for_each_statement(published: Path, trust: Trust) -> None:
    done = served("zerolora", "verify", ".", "--allowed-signers", str(trust.allowed), directory=published)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"verified  {BUILDERS}: 2 of 2 files as built; signed by builder@example.org, SHA256:")
    assert second.startswith(
        f"verified  {REBUILDERS}: rebuilt on EPYC 9654: equal to the byte (2 of 2 files); signed by alice@example.org"
    )
    assert done.stderr == "rebuilt on 1 machine: equal to the byte\n"
    assert done.returncode == 0
    (published / WEIGHTS).write_bytes(b"other")
    done = served("zerolora", "verify", ".", directory=published)
    assert done.stdout.splitlines()[0] == (
        f"wrong     {WEIGHTS}: has sha256 {sha256(published / WEIGHTS)[:12]}; {BUILDERS} says "
        f"{statement_of(published / BUILDERS)['subject'][1]['digest']['sha256'][:12]}"
    )
    assert (done.returncode, done.stderr) == (1, "")
    done = served("zerolora", "verify", "nowhere", directory=published)
    assert done.returncode == 2
    assert done.stderr == "zerolora: nowhere: there is no such directory; give one that `zerolora push` wrote\n"


def statement_of(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(envelope.read(path).payload)
    return value


def test_a_signature_counts_for_whom_the_user_names(published: Path, trust: Trust, keys: dict[str, Path]) -> None:
    findings, found = verify(published, Trust())
    assert [each.word for each in findings] == ["untrusted", "untrusted"]
    assert found == "rebuilt on 1 machine: equal to the byte"
    text, _ = signed(envelope.read(published / REBUILDERS).payload, str(keys["mallory"]))
    (published / REBUILDERS).write_text(text)
    findings, found = verify(published, trust)
    assert [each.word for each in findings] == ["verified", "untrusted"]
    assert found is None
    text, _ = signed(envelope.read(published / BUILDERS).payload, None)
    (published / BUILDERS).write_text(text)
    findings, _ = verify(published, Trust())
    assert (findings[0].word, findings[0].what.endswith("; not signed")) == ("unsigned", True)
    assert wrong(verify(published, trust)[0]) == ["statements: nobody whom you named signed the builder's statement"]


def test_an_allowed_signers_file_is_read_as_ssh_reads_it(
    published: Path, trust: Trust, keys: dict[str, Path], tmp_path: Path
) -> None:
    """ssh-keygen decides: a key for another namespace, or out of date, is no key."""
    public = keys["builder"].with_suffix(".pub").read_text()
    for options, counts in (
        ('namespaces="git"', False),
        ('valid-before="20200101"', False),
        ('namespaces="zerolora"', True),
    ):
        (tmp_path / "allowed").write_text(f"*@example.org {options} {public}")
        findings, _ = verify(published, Trust(tmp_path / "allowed"))
        assert (not wrong(findings)) == counts, options


def test_a_strangers_statement_vouches_for_no_added_file(published: Path, trust: Trust) -> None:
    """Beside the builder's, which the user trusts; it is read, and named as not signed."""
    (published / "model.py").write_text("")
    files = digests(published) | {"model.py": sha256(published / "model.py")}
    (published / "statements/mallory.json").write_text(signed(builders(files), None)[0])
    findings, _ = verify(published, trust)
    assert [each.word for each in findings] == ["unsigned", "verified", "verified", "wrong"]
    assert wrong(findings) == ["model.py: no statement by whom you named names it"]
    assert wrong(verify(published, Trust())[0]) == []


def test_a_certificate_counts_by_its_authority(published: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    public, authority = tmp_path / "builder.pub", keys["mallory"]
    shutil.copy(keys["builder"], tmp_path / "builder")
    shutil.copy(keys["builder"].with_suffix(".pub"), public)
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "id", "-n", "me@example.org", str(public)]
    subprocess.run(command, check=True)
    shutil.copy(tmp_path / "builder-cert.pub", public)
    text, _ = signed(envelope.read(published / BUILDERS).payload, str(public))
    (published / BUILDERS).write_text(text)
    key = authority.with_suffix(".pub").read_text()
    for line, counts in (
        (f"*@example.org cert-authority {key}", True),
        (f"*@example.org {key}", False),
        (f"*@elsewhere.org cert-authority {key}", False),
    ):
        (tmp_path / "allowed").write_text(line)
        findings, _ = verify(published, Trust(tmp_path / "allowed"))
        assert (not wrong(findings)) == counts, line


def change_file(directory: Path) -> None:
    (directory / CONFIG).write_text("{ }")


def remove_file(directory: Path) -> None:
    (directory / CONFIG).unlink()


def add_file(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"others")


def change_payload(directory: Path) -> None:
    """Say it of other weights, and keep the signature."""
    path = directory / BUILDERS
    value = json.loads(path.read_text())
    payload = base64.b64decode(value["payload"]).replace(b'"byproducts"', b'"by-products"')
    path.write_text(json.dumps(value | {"payload": base64.b64encode(payload).decode()}))


def take_another_signature(directory: Path) -> None:
    path, other = directory / REBUILDERS, json.loads((directory / BUILDERS).read_text())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"signatures": other["signatures"]}))


def of_another_model(directory: Path) -> None:
    (directory / REBUILDERS).unlink()
    attest(rebuild_json(directory.parent / "other.json", {WEIGHTS: "1" * 64}), directory / REBUILDERS, None)


def of_another_builder(directory: Path) -> None:
    (directory / BUILDERS).write_text(signed(builders({WEIGHTS: "1" * 64}), None)[0])


def of_another_namespace(directory: Path) -> None:
    """As git signs, with the same key."""
    path = directory / REBUILDERS
    value, key = json.loads(path.read_text()), directory.parent / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    content = envelope.encoded(base64.b64decode(value["payload"]))
    command = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", str(key)]
    said = subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode()
    sig = said.strip().removeprefix(ssh_signature.BEGIN).removesuffix(ssh_signature.END)
    path.write_text(json.dumps(value | {"signatures": [{"sig": "".join(sig.split())}]}))


def add_an_invalid_signature(directory: Path) -> None:
    """After a valid one: their order decides nothing."""
    path, other = directory / REBUILDERS, json.loads((directory / BUILDERS).read_text())
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"signatures": value["signatures"] + other["signatures"]}))


def link_a_folder(directory: Path) -> None:
    (directory / "code").symlink_to(directory.parent)


def link_a_named_file_to_nothing(directory: Path) -> None:
    (directory / CONFIG).unlink()
    (directory / CONFIG).symlink_to("nowhere")


def link_a_statement_to_nothing(directory: Path) -> None:
    (directory / "statements/bob.json").symlink_to("nowhere")


def call_a_folder_as_the_card(directory: Path) -> None:
    (directory / "README.md").unlink()
    (directory / "README.md").mkdir()
    (directory / "README.md/model.py").write_text("")


def break_a_line(directory: Path) -> None:
    """In a name, where what follows would be another finding."""
    (directory / "x\nverified  y").write_text("")


def contradict_a_subject(directory: Path) -> None:
    """By a by-product of the same name."""
    details = {"byproducts": [statement.described(CONFIG, "1" * 64)]}
    content = statement.written(digests(directory), PROVENANCE, {"runDetails": details})
    (directory / BUILDERS).write_text(signed(content, None)[0])


def be_of_another_type(directory: Path) -> None:
    content = statement.written(digests(directory), "https://slsa.dev/verification_summary/v1", {})
    (directory / REBUILDERS).write_text(signed(content, None)[0])


def have_an_odd_machine(directory: Path) -> None:
    content = envelope.read(directory / REBUILDERS).payload.replace(b'"EPYC 9654"', b'{"gpus":"many"}')
    (directory / REBUILDERS).write_text(signed(content, None)[0])


def no_builder(directory: Path) -> None:
    (directory / BUILDERS).unlink()


def leave_the_directory(directory: Path) -> None:
    files = digests(directory) | {"../rebuild.json": sha256(directory.parent / "rebuild.json")}
    (directory / BUILDERS).write_text(signed(builders(files), None)[0])


INVALID = "its signature is not one of this statement by the key SHA256:"
AGAIN = "get this statement again from whoever wrote it"


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (change_file, f"{CONFIG}: has sha256 "),
        (remove_file, f"{CONFIG}: is missing; {BUILDERS} names it"),
        (add_file, "model.safetensors: no statement names it"),
        (change_payload, f"{BUILDERS}: {INVALID}"),
        (take_another_signature, f"{REBUILDERS}: {INVALID}"),
        (of_another_namespace, f"{REBUILDERS}: {INVALID}"),
        (add_an_invalid_signature, f"{REBUILDERS}: {INVALID}"),
        (link_a_folder, "code: no statement names it"),
        (link_a_named_file_to_nothing, f"{CONFIG}: is no file, but a link to none or a pipe; {BUILDERS} names it"),
        (link_a_statement_to_nothing, "statements/bob.json: is a link to 'nowhere', which does not exist"),
        (call_a_folder_as_the_card, "README.md/model.py: no statement names it"),
        (break_a_line, "x\nverified  y: no statement names it"),
        (contradict_a_subject, f"{BUILDERS}: has two digests of '{CONFIG}'; {AGAIN}"),
        (
            be_of_another_type,
            f"{REBUILDERS}: is no statement of a rebuild, but of type 'https://slsa.dev/verification_summary/v1'; ",
        ),
        (have_an_odd_machine, f"{REBUILDERS}: zerolora_rebuild.machine.gpus is 'many'; expected "),
        (of_another_model, f"{REBUILDERS}: is a statement of another model: it does not name this {WEIGHTS}; {AGAIN}"),
        (of_another_builder, f"{BUILDERS}: is a statement of another model: none of its files is here; {AGAIN}"),
        (no_builder, "statements: has no statement of the builder; get the directory again"),
        (
            leave_the_directory,
            f"{BUILDERS}: subject has a key that is '../rebuild.json'; expected the relative path of a file",
        ),
    ],
)
def test_what_was_tampered_with_is_named(tamper: Callable[[Path], None], said: str, published: Path) -> None:
    assert wrong(verify(published, Trust())[0]) == []
    tamper(published)
    findings, found = verify(published, Trust())
    assert [line for line in wrong(findings) if line.startswith(said)], findings
    assert all("\n" not in str(each) for each in findings)
    assert found is None or tamper is not of_another_model


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "is no statement, DSSE envelope or sigstore bundle"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b'{"_type": "https://in-toto.io/Statement/v0.1"}', "is missing"),
        (
            b'{"payload": "e30=", "payloadType": "text/plain", "signatures": [{"sig": "aGk="}]}',
            "payloadType is 'text/plain'",
        ),
        (b'{"payload": "{", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "aGk="}]}', "base64"),
        (b'{"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": []}', "1 or more entries"),
        (
            b'{"payload": "", "payloadType": "", "signatures": [{"sig": ""}]}',
            "signatures.0.sig is ''; expected 1 or more",
        ),
        (b'{"payload": 1, "payload": 2}', "'payload' is there twice"),
        (b" " * ((16 << 20) + 1), "too many for such a file"),
    ],
)
def test_what_is_no_statement_is_one_line(content: bytes, said: str, published: Path) -> None:
    (published / "statements/bob.json").write_bytes(content)
    (line,) = wrong(verify(published, Trust())[0])
    assert line.startswith("statements/bob.json") and said in line
    assert "\n" not in line


def test_a_pipe_in_place_of_a_statement_does_not_block(published: Path) -> None:
    os.mkfifo(published / "statements/bob.json")
    (line,) = wrong(verify(published, Trust())[0])
    assert line == "statements/bob.json: is a pipe or a device; a file is expected"


def test_no_changed_byte_of_a_statement_is_verified(published: Path, trust: Trust) -> None:
    """Unless the statement is the same: a byte of white space, or of the key's name, which nothing reads."""
    path = published / BUILDERS
    content, payload = path.read_bytes(), envelope.read(path).payload
    generator = random.Random(1)  # noqa: S311
    refused = 0
    for place in generator.sample(range(len(content)), 24):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << generator.randrange(7)]) + content[place + 1 :])
        findings, _ = verify(published, trust)
        if wrong(findings):
            refused += 1
        else:
            assert envelope.read(path).payload == payload
    assert refused > 12


def test_what_is_signed_is_what_dsse_says() -> None:
    """The example of the specification (protocol.md), with this payload's type."""
    assert envelope.encoded(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"


@pytest.mark.parametrize(
    ("verdict", "result", "list_of"),
    [("equal within bounds", "WARNED", "warnedTests"), ("different", "FAILED", "failedTests")],
)
def test_a_verdict_becomes_a_test_result(verdict: str, result: str, list_of: str, tmp_path: Path) -> None:
    weights, config = f"results/default/adapter/{WEIGHTS}", f"results/default/adapter/{CONFIG}"
    products = [
        product(weights, "1" * 64, "2" * 64),
        product(config, "3" * 64, "3" * 64, "apart from paths of the machine"),
        product("results/default/zero.json", "4" * 64, "4" * 64),
        product("order of the rows", "5" * 64, "5" * 64),
    ]
    machine = {"processor": "EPYC 9654", "torch": "2.13.0+cpu", "kernels": "AVX512"}
    more = {"explanation": "row 7: a secret", "first_difference": {"path": "/home/alice/x"}, "revision": "0" * 40}
    path = rebuild_json(tmp_path / "r.json", {}, verdict, products=products, machine=machine, **more)
    assert attest(path, tmp_path / "alice.json", None).word == "unsigned"
    text = (tmp_path / "alice.json").read_text()
    value = json.loads(text)
    assert [each["name"] for each in value["subject"]] == [weights, "results/default/zero.json"]
    predicate = value["predicate"]
    assert (predicate["result"], predicate[list_of]) == (result, [weights])
    assert predicate["passedTests"] == ["order of the rows", config, "results/default/zero.json"]
    project = {"name": "project", "digest": {"gitCommit": "0" * 40}}
    assert predicate["configuration"] == [{"uri": "pkg:generic/zerolora@0.2.0"}, project]
    assert predicate["zerolora_rebuild"]["rebuilt"] == {weights: "2" * 64}
    assert "secret" not in text and "/home" not in text
    found = rebuilt.read(envelope.read(tmp_path / "alice.json").statement, path)
    assert (found.verdict, found.equal) == (verdict, frozenset({"4" * 64}))
    assert found.machine == "EPYC 9654, AVX512 kernels, torch 2.13.0+cpu, no GPU"
    assert rebuilt.headline([found]) is None


def test_gpus_of_a_machine_have_their_names() -> None:
    gpu = ["NVIDIA H200", 9, 0]
    found = {"processor": "EPYC", "gpus": [gpu, gpu], "driver": "580.95", "torch": "2.13.0", "cluster": ["a"]}
    assert in_words(found | {"kernels": "AVX2, CUDA 13.0, cuDNN 91000"}) == (
        'EPYC, AVX2 kernels, CUDA 13.0, cuDNN 91000, torch 2.13.0, 2 × NVIDIA H200, driver 580.95, cluster ["a"]'
    )
    assert in_words({}) == in_words("") == "a machine of unknown kind"


def test_machines_of_one_kind_count_once(tmp_path: Path) -> None:
    path, found = tmp_path / "r.json", []
    for machine in ("one", "two", "one"):
        rebuild_json(path, {WEIGHTS: "1" * 64}, machine=machine)
        found.append(rebuilt.read(statement.parsed(path, rebuilt.statement_of(path)), path))
    assert rebuilt.headline(found) == "rebuilt on 2 machines: equal to the byte"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "the same"}, "verdict is 'the same'; expected"),
        ({"products": []}, "products is []; expected 1 or more entries"),
        (
            {"products": [product("results/a", "1" * 64, "2" * 64) | {"equal": True}]},
            "equal of results/a contradicts its two digests",
        ),
        ({"products": [product("results/a", "1" * 64, None)]}, "says equal to the byte, but not of results/a"),
        (
            {"products": [product("results/a", "1" * 64, "1" * 64), product("work/checkpoints/b", "1" * 64, None)]},
            "says equal to the byte, but not of work/checkpoints/b",
        ),
        ({"products": [product("results/a", "1", None)]}, "original is '1'; expected a sha256 of 64"),
        ({"products": [product("order of the rows", "1" * 64, "1" * 64)]}, "compared no file of the results, so it"),
    ],
)
def test_a_rebuild_that_contradicts_itself_is_not_attested(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = rebuild_json(tmp_path / "r.json", {WEIGHTS: "1" * 64}, **changes)
    with pytest.raises(UserError) as raised:
        attest(path, tmp_path / "alice.json", None)
    assert str(raised.value).startswith(f"{path}: ") and said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "alice.json").exists()


def test_attest_writes_a_statement_once(published: Path, keys: dict[str, Path]) -> None:
    folder = published.parent
    command = ("zerolora", "attest", "rebuild.json", "--output", "mine.json", "--sign")
    done = served(*command, str(keys["alice"]), directory=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("mine.json is written, signed by SHA256:")
    assert (folder / "mine.json").read_bytes() == (published / REBUILDERS).read_bytes()
    done = served(*command, str(folder / "no_key"), directory=folder)
    assert (done.returncode, done.stderr) == (
        2, "zerolora: --output mine.json: already exists; choose another name, or remove it\n"
    )  # fmt: skip
    (folder / "mine.json").unlink()
    (folder / "no_key").write_text("x")
    done = served(*command, str(folder / "no_key"), directory=folder)
    assert done.returncode == 2
    assert (
        done.stderr.startswith(f"zerolora: --sign {folder}/no_key: ssh-keygen signed nothing (")
        and done.stderr.count("\n") == 1
    )


@pytest.mark.skipif(find_spec("sigstore") is not None, reason="sigstore is installed")
def test_without_the_library_of_sigstore_a_bundle_is_not_checked(published: Path, keys: dict[str, Path]) -> None:
    bundle = {
        "mediaType": "",
        "verificationMaterial": {},
        "dsseEnvelope": json.loads((published / BUILDERS).read_text()),
    }
    (published / BUILDERS).write_text(json.dumps(bundle))
    findings, _ = verify(published, Trust())
    assert findings[0].word == "untrusted"
    said = "signed by sigstore, which is not checked: its library is not installed: `pip install 'zerolora[sigstore]'`"
    assert findings[0].what.endswith(said)
    with pytest.raises(UserError, match="^--sign sigstore: its library is not installed: `pip"):
        signed(b"", "sigstore")


def test_an_identity_has_an_issuer(published: Path) -> None:
    with pytest.raises(UserError, match="^--identity 'me@example.org': use NAME=ISSUER, as "):
        Trust.of(None, ["me@example.org"])
    (identity,) = Trust.of(None, ["https://x.org/a=b@main=https://issuer.example.org"]).identities
    assert identity == ("https://x.org/a=b@main", "https://issuer.example.org")
    with pytest.raises(UserError, match="^--allowed-signers .*: there is no such file; see ssh-keygen"):
        Trust.of(published / "none", [])
