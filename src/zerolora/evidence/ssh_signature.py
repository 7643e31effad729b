"""SSH signatures by the user's own `ssh-keygen`: it knows agents, hardware keys, and all of allowed_signers."""

import base64
import hashlib
import struct
import subprocess
import tempfile
from pathlib import Path

from zerolora.errors import UserError
from zerolora.evidence.envelope import LONGEST_SIGNATURE

NAMESPACE = "zerolora"
"""What the signature is for, which `namespaces` of an allowed_signers file can name (ssh-keygen(1))."""
MAGIC = b"SSHSIG"
BEGIN, END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
SECONDS = 60
"""A check takes milliseconds."""


def sign(content: bytes, key: Path) -> bytes:
    """Return the signature of `content` by a private key, or by the agent's for a public key.

    ssh-keygen asks on the terminal for a passphrase or a touch. Raises UserError if nothing was signed.
    """
    if not key.is_file():
        raise UserError(f"--sign {key}: there is no such file; give a key of SSH, as ~/.ssh/id_ed25519, or sigstore")
    done = _keygen("sign", "-f", str(key), content=content, seconds=None)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"--sign {key}: ssh-keygen signed nothing ({said}); give a private key, or one of your agent")
    armoured = done.stdout.decode().strip().removeprefix(BEGIN).removesuffix(END)
    return base64.b64decode("".join(armoured.split()), validate=True)


def fingerprint(signature: bytes) -> str | None:
    """Return the fingerprint of the key in a signature, as SSH shows it; None if it is not an SSH signature."""
    start = len(MAGIC) + 8
    if len(signature) > LONGEST_SIGNATURE or len(signature) < start or not signature.startswith(MAGIC):
        return None
    version, length = struct.unpack_from(">II", signature, len(MAGIC))
    key = signature[start : start + length]
    if version != 1 or len(key) < length:
        return None
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def is_valid(content: bytes, signature: bytes) -> bool:
    """Return whether a signature is that of `content` by the key in it, whosever it is."""
    with tempfile.TemporaryDirectory() as folder:
        return _check("check-novalidate", content, _armoured(signature, folder))


def signer(content: bytes, signature: bytes, allowed: Path) -> str | None:
    """Return the principal of an allowed_signers file whose valid signature of `content` this is; None if of none."""
    with tempfile.TemporaryDirectory() as folder:
        path = _armoured(signature, folder)
        found = _keygen("find-principals", "-s", path, "-f", str(allowed))
        names = found.stdout.decode(errors="replace").splitlines() if found.returncode == 0 else []
        for name in names:
            if _check("verify", content, path, "-f", str(allowed), "-I", name):
                return name
    return None


def _check(verb: str, content: bytes, signature: str, *arguments: str) -> bool:
    return _keygen(verb, "-s", signature, *arguments, content=content).returncode == 0


def _armoured(signature: bytes, folder: str) -> str:
    """Write a signature to a file for ssh-keygen and return its path."""
    path = Path(folder, "signature")
    text = base64.b64encode(signature).decode()
    lines = [text[start : start + 70] for start in range(0, len(text), 70)]
    path.write_text("\n".join([BEGIN, *lines, END, ""]), encoding="ascii")
    return str(path)


def _keygen(
    verb: str, *arguments: str, content: bytes = b"", seconds: int | None = SECONDS
) -> subprocess.CompletedProcess[bytes]:
    namespace = () if verb == "find-principals" else ("-n", NAMESPACE)
    command = ["ssh-keygen", "-Y", verb, *namespace, *arguments]
    try:
        return subprocess.run(command, input=content, capture_output=True, check=False, timeout=seconds)
    except FileNotFoundError:
        raise UserError(
            "ssh-keygen is not on PATH, which signs and checks statements; install OpenSSH's client, 8.9 or newer"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"ssh-keygen -Y {verb} took longer than {seconds} s; see what it waits for") from None
