"""The licence of a model card's metadata: one of the hub's names, or `other` with the name that the config has."""

import re

HUB_NAMES = frozenset(
    {
        "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m",
        "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd",
        "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5",
        "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
        "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
        "cdla-sharing-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
        "etalab-2.0", "eupl-1.1", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0",
        "isc", "lppl-1.3c", "ms-pl", "mpl-2.0", "odc-by", "odbl", "openrail++", "osl-3.0", "postgresql", "ofl-1.1",
        "ncsa", "unlicense", "zlib", "pddl", "lgpl-lr", "deepfloyd-if-license", "llama2", "gemma",
    }
)  # fmt: skip
"""The identifiers of the hub's documentation, "Licenses" (hub-docs, docs/hub/repositories-licenses.md), but for
`unknown` and `other`. The hub refuses any other; those that it has learned since are sent as `other`, with their name.
"""


def licence_metadata(name: str) -> dict[str, str]:
    """Return `license`, and `license_name` if the hub has no such licence, for the SPDX name that the config has.

    SPDX names of the GNU licences say `-only` or `-or-later`; the hub's do not.
    """
    lower = name.strip().lower()
    known = re.sub(r"-(only|or-later)$", "", lower)
    if known in HUB_NAMES:
        return {"license": known}
    slug = re.sub(r"[^a-z0-9.]+", "-", lower).strip("-.")
    return {"license": "other", "license_name": slug} if slug else {}
