"""The statements of rebuilds in config/statements/, which `zerolora push` publishes beside the model they are about."""

import re
from pathlib import Path
from typing import NamedTuple

from zerolora.errors import UserError
from zerolora.evidence import envelope, rebuilt
from zerolora.evidence.rebuilt import Rebuild
from zerolora.evidence.statement import Digests
from zerolora.evidence.verify import Signer, Trust, signer_of
from zerolora.log import LOGGER

STATEMENTS = Path("config/statements")
BUILDERS = "provenance.json"
"""Name of the builder's own statement."""
NAMES = re.compile(r"\w[\w.-]*\.json", re.ASCII)


class RebuildStatement(NamedTuple):
    """A statement of a rebuild of a pushed model."""

    name: str
    text: str
    rebuild: Rebuild
    signer: Signer


def rebuild_statements(files: Digests) -> list[RebuildStatement]:
    """Return the statements that are about these files; those about other weights are left out, with a line in the log.

    Raises UserError for a file that is no statement of a rebuild, or whose signature is not valid.
    """
    result = []
    for path in sorted(STATEMENTS.iterdir()) if STATEMENTS.is_dir() else ():
        if not NAMES.fullmatch(path.name) or path.name == BUILDERS:
            raise UserError(f"{path}: is not a name of a rebuild's statement; call it NAME.json, not {BUILDERS}")
        file = envelope.read(path)
        signer, rebuild = signer_of(file, Trust()), rebuilt.read(file.statement, path)
        if signer.word == "wrong":
            raise UserError(f"{path}: {signer.about}; remove it, or get it again from whoever wrote it")
        if rebuild.has_weights_of(files):
            result.append(RebuildStatement(path.name, file.text, rebuild, signer))
        else:
            LOGGER.info("%s: is about other weights; not pushed", path)
    return result
