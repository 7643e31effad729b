"""Draw docs/images/report.png: the top of the page of a finished run, on a wide light screen and on a dark phone.

.venv/bin/python docs/report_picture.py results/default/report.html docs/images/report.png
"""

import shutil
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import sync_playwright

SCREENS: tuple[tuple[int, int, Literal["light", "dark"]], ...] = ((1100, 1950, "light"), (390, 1950, "dark"))
"""Width and height in pixels, and the colour scheme."""
GAP = 24


def draw(page: Path, output: Path) -> None:
    """Write the picture of `page`, a file, to `output`."""
    parts = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height, scheme in SCREENS:
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("#accuracy .live svg, #loss-curve .live svg")
            file = output.with_suffix(f".{scheme}.png")
            tab.screenshot(path=file)
            parts.append(Image.open(file).convert("RGB"))
            file.unlink()
        browser.close()
    whole = Image.new("RGB", (sum(part.width for part in parts) + GAP, parts[0].height), "white")
    whole.paste(parts[0], (0, 0))
    whole.paste(parts[1], (parts[0].width + GAP, 0))
    whole.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(output, optimize=True)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
