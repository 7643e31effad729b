"""Record a terminal: from a folder with a model and rows to a trained adapter, as docs/figures/first-run.svg.

.venv/bin/python docs/first_run_picture.py MODEL     # a directory, as resources/weights/smollm2-135m-instruct; minutes
"""

import json
import sys
import tempfile
from pathlib import Path

from recording import picture, recorded

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/figures/first-run.svg"
ROWS = [
    {"instruction": f"What is {one} + {other}?", "output": f"{one} + {other} = {one + other}"}
    for one in range(1, 21)
    for other in range(1, 21)
]
COMMANDS = (
    "ls",
    "zerolora init --model models/smollm2 --data sums.jsonl",
    "zerolora run",
    "ls results/sums/adapter",
)


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "models/smollm2").symlink_to(Path(model).resolve())
        (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
        text = recorded(COMMANDS, folder)
    print(text)
    write_text(PICTURE, picture(text, "a model and rows", "first-run"))


if __name__ == "__main__":
    main(*sys.argv[1:])
