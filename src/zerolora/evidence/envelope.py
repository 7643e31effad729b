"""Files of statements: as plain JSON, unsigned; in a DSSE envelope with SSH signatures; in a sigstore bundle.

DSSE: github.com/secure-systems-lab/dsse, protocol.md and envelope.md. An SSH signature is the blob of OpenSSH's
PROTOCOL.sshsig over the bytes that DSSE defines, so `ssh-keygen -Y verify` checks it.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora import json_file
from zerolora.errors import UserError, shown
from zerolora.evidence import statement
from zerolora.evidence.statement import LARGEST, REMEDY, Statement
from zerolora.files import as_json
from zerolora.json_kinds import JsonObject, Text, check

PAYLOAD_TYPE = "application/vnd.in-toto+json"
SIGNATURES = 16
"""Most signatures of an envelope."""
LONGEST_SIGNATURE = 1 << 16
"""Bytes; an RSA key of 16,384 bits has 4,500 with the key."""


class SignatureKeys(JsonObject):
    """A signature in an envelope."""

    sig: Annotated[Text, Field(min_length=1, max_length=2 * LONGEST_SIGNATURE)]


class EnvelopeKeys(JsonObject):
    """A DSSE envelope."""

    payload: Text
    payloadType: Text
    signatures: Annotated[list[SignatureKeys], Field(min_length=1, max_length=SIGNATURES)]


class BundleKeys(JsonObject):
    """A sigstore bundle; its library reads the rest."""

    dsseEnvelope: EnvelopeKeys


@dataclass(frozen=True)
class StatementFile:
    """A file with a statement. Its signatures are not checked yet."""

    statement: Statement
    payload: bytes
    """Bytes of the statement, which were signed."""
    form: Literal["plain", "dsse", "sigstore"]
    signatures: tuple[bytes, ...] = ()
    text: str = ""


def encoded(payload: bytes) -> bytes:
    """Return what is signed of a statement: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def unsigned(payload: bytes) -> str:
    """Return the text of a statement's file without a signature."""
    return as_json(json_file.parsed(Path("statement"), payload.decode(), ""))


def sealed(payload: bytes, signature: bytes, key: str) -> str:
    """Return an envelope with an SSH signature by the key with this fingerprint."""
    signatures = [{"keyid": key, "sig": base64.b64encode(signature).decode()}]
    return as_json(
        {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": signatures}
    )


def read(path: Path) -> StatementFile:
    """Return the statement in a file. Raises UserError if it is none, in one of the three forms, within bounds."""
    return opened(path, json_file.read_bytes(path, LARGEST))


def opened(path: Path, content: bytes) -> StatementFile:
    """Return the statement in the bytes of file `path`, as `read` does."""
    text = json_file.decoded(path, content)
    value = json_file.parsed(path, text, REMEDY)
    if "_type" in value:
        return StatementFile(statement.parsed(path, content), content, "plain", text=text)
    if "dsseEnvelope" in value:
        check(value, BundleKeys, path, REMEDY)
        payload, _ = _opened(path, value["dsseEnvelope"])
        return StatementFile(statement.parsed(path, payload), payload, "sigstore", text=text)
    if "payload" not in value:
        raise UserError(f"{path}: is no statement, DSSE envelope or sigstore bundle; {REMEDY}")
    check(value, EnvelopeKeys, path, REMEDY)
    payload, signatures = _opened(path, value)
    return StatementFile(statement.parsed(path, payload), payload, "dsse", signatures, text)


def _opened(path: Path, envelope: dict[str, Any]) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the payload and the signatures of an envelope."""
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise UserError(f"{path}: payloadType is {shown(envelope['payloadType'])}; expected {PAYLOAD_TYPE}; {REMEDY}")
    try:
        return (
            base64.b64decode(envelope["payload"], validate=True),
            tuple(base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]),
        )
    except (binascii.Error, ValueError):
        raise UserError(f"{path}: its payload or a signature is not base64; {REMEDY}") from None
