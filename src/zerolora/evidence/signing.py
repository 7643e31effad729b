"""Signing a statement with what the user has: a key of SSH, or an identity of sigstore. Without, it is unsigned."""

from pathlib import Path

from zerolora.errors import UserError
from zerolora.evidence import envelope, rebuilt, sigstore_bundle, ssh_signature
from zerolora.evidence.verify import Signer, Trust, signer_of
from zerolora.files import write_text

SIGSTORE = "sigstore"


def signed(payload: bytes, sign: str | None) -> tuple[str, Signer]:
    """Return the text of a statement's file, and who signed it.

    `sign`: path of a key of SSH, "sigstore", or None for no signature. Raises UserError if nothing can be signed.
    """
    if sign is None:
        text = envelope.unsigned(payload)
    elif sign == SIGSTORE:
        text = sigstore_bundle.sign(payload)
    else:
        signature = ssh_signature.sign(envelope.encoded(payload), Path(sign).expanduser())
        text = envelope.sealed(payload, signature, ssh_signature.fingerprint(signature) or "")
    signer = signer_of(envelope.opened(Path("the new statement"), text.encode()), Trust())
    assert signer.word != "wrong", signer.about
    return text, signer


def attest(rebuild: Path, output: Path, sign: str | None) -> Signer:
    """Write the statement of a rebuild.json to `output` and return who signed it."""
    payload = rebuilt.statement_of(rebuild)
    if output.exists():
        raise UserError(f"--output {output}: already exists; choose another name, or remove it")
    text, signer = signed(payload, sign)
    write_text(output, text)
    return signer
