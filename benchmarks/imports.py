"""Imports every training config of other tools' repositories, and counts those whose meaning is the same here.

    python benchmarks/imports.py axolotl=FOLDER llamafactory=FOLDER handbook=FOLDER trl=FOLDER swift=FOLDER \
        xtuner=FOLDER torchtune=FOLDER [--output benchmarks/results/imports.json]

Each FOLDER is a checkout, of which the files of FILES are imported. A config is `equal` if no line of the import says
that something changes the result; what only the user can fill in, such as where the rows are, is no change.
`changed` ones are imported with such lines, and the keys of these are counted. `refused` ones stop the import.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.imports.formats.import_format import CHANGES
from zerolora.imports.translate import import_config

FILES = {
    "axolotl": "examples/**/*.y*ml",
    "llamafactory": "examples/**/*.y*ml",
    "handbook": "recipes/*/**/*.yaml",
    "trl": "examples/cli_configs/*.yaml",
    "swift": "examples/**/*.sh",
    "xtuner": "xtuner/configs/**/*.py",
    "torchtune": "recipes/configs/**/*lora*.yaml",
}
"""The configs in a tool's repository. Those of ms-swift are its scripts with a command that trains."""
SOURCES = {"trl": "trl-sft"}
"""The format of files that do not tell theirs: TRL's example is of `trl sft`."""
MOST = 160  # characters of a refusal
TRAINS = re.compile(r"\bswift (sft|pt|rlhf)\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="as in axolotl=FOLDER")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/imports.json"))
    arguments = parser.parse_args()
    result = {name: _of(name, Path(folder)) for name, _, folder in (each.partition("=") for each in arguments.folders)}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, each in result.items():
        print(f"{name}: {len(each['equal'])} equal, {len(each['changed'])} changed, {len(each['refused'])} refused")


def _of(tool: str, folder: Path) -> dict[str, Any]:
    """Return the outcome of each config of a checkout."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    equal, changed, refused = [], {}, {}
    keys: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for file in sorted(folder.glob(FILES[tool])):
            if file.suffix == ".sh" and not TRAINS.search(file.read_text(encoding="utf-8")):
                continue
            if file.name == "__init__.py" or "accelerate_configs" in file.parts:
                continue
            name = str(file.relative_to(folder))
            try:
                lines = import_config(file, SOURCES.get(tool), Path(scratch) / "config.yaml", True, False).of(CHANGES)
            except UserError as error:
                refused[name] = str(error).replace(f"{folder}/", "")[:MOST]
                continue
            if lines:
                changed[name] = sorted({line.key for line in lines})
                keys.update(changed[name])
            else:
                equal.append(name)
    return {
        "commit": commit, "date": date, "keys": dict(keys.most_common()),
        "equal": equal, "changed": changed, "refused": refused,
    }  # fmt: skip


if __name__ == "__main__":
    main()
