"""The commands that the documents show."""

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / f"{folder}/README.md" for folder in ("config", "profiles", "benchmarks")),
    ]
)
PROGRAMS = {
    "zerolora",
    "snakemake",
    "dvc",
    "make",
    "git",
    "python",
    "python3",
    "python3.11",
    "pip",
    "pytest",
    "mkdocs",
} | {"sbatch", "srun", "scancel", "apptainer", "docker", "hf", "ollama", "llama-cli", "vllm"}
FENCE = re.compile(r"^ *```")
VARIABLE = re.compile(r"^[A-Z_]+=\S*$")


@dataclass(frozen=True)
class Command:
    """A command as a document shows it."""

    page: str
    """Path of the document in the repository."""
    text: str
    """The line, joined with those that continue it, without its remark."""

    @property
    def words(self) -> list[str]:
        """The program's name and its arguments, without the directory and the variables before it."""
        words = _split(self.text)[len(self.variables) :]
        return [Path(words[0]).name, *words[1:]]

    @property
    def variables(self) -> dict[str, str]:
        """What is set before the program's name."""
        result: dict[str, str] = {}
        for word in _split(self.text):
            if not VARIABLE.match(word):
                break
            name, _, value = word.partition("=")
            result[name] = value
        return result


@functools.cache
def _split(text: str) -> list[str]:
    return shlex.split(text)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's code blocks: indented ones, and fenced ones without a language or of a shell."""
    fenced, shell = False, True
    lines = page.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if FENCE.match(line):
            fenced, shell = not fenced, line.strip() in ("```", "```sh", "```bash", "```console")
            continue
        if not shell if fenced else not re.match(r" {4}", line):
            continue
        text = line.strip().removeprefix("$ ")
        for more in lines[index + 1 :]:
            if not re.match(r"\s+--\w", more):
                break
            text += f" {more.strip()}"
        text = re.sub(r"\s+#.*", "", text)
        first = next((word for word in text.split() if not VARIABLE.match(word)), "")
        if Path(first).name in PROGRAMS and first.rpartition("/")[0] in ("", ".venv/bin", "~/vllm/bin"):
            yield Command(page.relative_to(ROOT).as_posix(), text)


COMMANDS = [command for page in PAGES for command in commands(page)]
