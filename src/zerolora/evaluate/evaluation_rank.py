"""One of several ranks of an evaluation: python -m zerolora.evaluate.evaluation_rank FILE, as ranks.py wrote it."""

import sys
from pathlib import Path

from zerolora.compat import torchao_patches
from zerolora.errors import UserError
from zerolora.evaluate.ranks import run_rank
from zerolora.files import read_json
from zerolora.log import set_up

if __name__ == "__main__":
    set_up()
    torchao_patches.hide()
    try:
        run_rank(read_json(Path(sys.argv[1]), "zerolora evaluate"))
    except UserError as error:
        sys.exit(f"zerolora: {error}")
