"""Results that the user keeps although the code that makes them has changed (`zerolora keep`).

Of each stage config/kept/codes.json has the code fingerprint of today and the one that the kept result was made with,
which both engines then take for today's. Once the code changes again, the entry means nothing.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from zerolora.errors import UserError
from zerolora.files import write_json

KEPT = Path("config/kept/codes.json")
Kept = Mapping[str, Mapping[str, str]]
"""By stage, as in train@default, the code of the kept result by the code of today."""
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def read_kept() -> dict[str, dict[str, str]]:
    """Return what the user keeps; nothing without the file. Raises UserError if the file is not as `zerolora keep`
    writes it."""
    try:
        value = json.loads(KEPT.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        value = None
    if not (isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())):
        raise UserError(f"{KEPT}: is not what `zerolora keep` wrote; restore it by git, or delete it")
    codes = [code for each in value.values() for pair in each.items() for code in pair]
    if not all(isinstance(code, str) and FINGERPRINT.fullmatch(code) for code in codes):
        raise UserError(f"{KEPT}: has other values than code fingerprints; restore it by git, or delete it")
    return value


def write_kept(kept: Kept) -> None:
    """Write the file; delete it if nothing is kept."""
    if kept:
        write_json(KEPT, kept)
    else:
        KEPT.unlink(missing_ok=True)


def code_of(kept: Kept, stage: str, now: str) -> str:
    """Return the code that counts for a stage: that of its kept result, else today's."""
    return kept.get(stage, {}).get(now, now)
