"""What ranks tell each other through the store of the rendezvous, signed with a secret that only they have.

torch's store has no authentication, and lists its keys: every process that reaches its port can read and write it. The
secret comes in a variable of the environment, which only this user's processes can read: from the launcher, where one
process starts all ranks or reaches all hosts. Where a cluster's launcher starts a process on each node, these share a
file in the run's checkpoint folder, which only this user can read. Without a common one, ranks say so and train on.
"""

import hmac
import json
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from zerolora.log import LOGGER

SECRET = "ZEROLORA_SECRET"  # noqa: S105 (the name of a variable)
LENGTH = 64
"""Characters of a secret."""
MAC = 64
"""Characters of a signature (HMAC-SHA256)."""
WAIT_SECONDS = 10.0
"""For the process that writes the file."""


def new_secret() -> str:
    """Return a random secret."""
    return secrets.token_hex(LENGTH // 2)


def common_secret(folder: Path) -> str:
    """Return the secret in a folder that all nodes have, drawn by the first process that asks; "" without a private
    file, which some file systems do not have."""
    path = folder / f".secret-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    with os.fdopen(file, "w", encoding="ascii") as new:
        new.write(new_secret())
    return _read(path)


def _read(path: Path) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii", errors="replace") as file:
            status, text = os.fstat(file.fileno()), file.read(LENGTH)
        if len(text) == LENGTH or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if len(text) == LENGTH and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return text
    LOGGER.warning("%s: is not a secret of this user alone; delete it, or export %s to all ranks", path, SECRET)
    return ""


def signed(key: str, value: Any) -> str:
    """Return a JSON value for the store's `key`."""
    text = json.dumps(value)
    return _mac(key, text.encode()).decode() + text


def verified(key: str, data: bytes) -> Any:
    """Return the value that a rank has signed for the store's `key`; None if another process has written it."""
    mac, text = data[:MAC], data[MAC:]
    if not hmac.compare_digest(mac, _mac(key, text)):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # without a secret, anybody can sign
        return None


def _mac(key: str, text: bytes) -> bytes:
    secret = os.environ.get(SECRET, "").encode()
    return hmac.digest(secret, f"{key}\n".encode() + text, "sha256").hex().encode()
