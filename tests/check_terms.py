"""Check that code, docs and messages use the terms of docs/glossary.md: python tests/check_terms.py [FILE ...].

Each line that has a word of the list below is printed with what to use instead. Exit code 1 if there is one.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".cfg", ".html", ".md", ".py", ".rst", ".sh", ".smk", ".toml", ".yaml", ".yml", ""}
# This list, the table it is made from, licences, and data are not prose.
SKIPPED = (
    "tests/check_terms.py",
    "docs/glossary.md",
    "LICENSE",
    "envs/requirements.lock",
    "envs/requirements.hashes",
    "tests/templates/",
)

TERMS: dict[str, str] = {
    r"\bproducts\.py\b|\bimport products\b": "cpu_matmul",
    r"\bmeeting (?:point|of)\b|import meet\b": "rendezvous",
    r"\bpace of a rank\b|\bpaces\b": "straggler detection",
    r"\breadings\b": "system monitor",
    r"\bfit\.py\b": "truncation",
    r"\bcutting\b": "chunking",
    r"\bdeal(?:s|t|ing)? (?:rows|them) (?:out )?to (?:the )?ranks\b|\border import deal\b": "assign to ranks",
    r"\bthe tape\b|\bon the tape\b": "memory tracer",
    r"\bown_json\b": "user_config",
    r"\bagreement\.py\b": "engine_sync",
    r"\bscripts/noted\b": "record_slurm_step",
    r"\blighten\b": "apply_startup_patches",
    r"\bjudge_afresh\b|\bafresh\b": "replan_after_same_outputs, or again",
    r"\bTorn\b": "CorruptCheckpoint",
    r"\b(?:class|import) Shape\b": "ModelSpec",
    r"\blearned tokens?\b|\btokens? (?:that (?:is|are) )?learned\b": "supervised",
    r"\bshare[sd]? out\b": "sharded",
    r"\bdoes not do\b": "the value that is expected",
    r"\bof one mind\b|\bmood\b|\bhad again\b|\bthe hooks rest\b": "plain words, without a personification",
    r"\bthrow away nothing\b": "plain words",
    r"\banew\b": "again, or over",
    r"\b(?:go|goes|went|going|gone) on from\b": "resume, or continue",
    r"\bmend(?:s|ed|ing)?\b": "fix, or correct",
    r"\bheard of\b|\btold of\b": "respond, or report",
    r"\bwatch\.py\b|\bimport watch\b": "heartbeat",
    r"\b(?:class|import) Pass\b": "ForwardSpec",
    r"\bscripts/(?:adopt|record)\b": "import_dvc_state, commit_dvc_state",
    r"\bbinding\.py\b": "resume_key, run_fingerprint",
    r"\bzerolora/zero/|\bzerolora\.zero\b": "planner/",
    r"\bcompat[./]preempted\b": "slurm_executor_patches",
    r"(?<!learned )\blearnt\b": "supervised, or in the loss",
}


def faults(path: Path) -> list[str]:
    """Return a line for each term of `path` that has another word in the glossary."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; use {instead}"
        for number, line in enumerate(lines, 1)
        for pattern, instead in TERMS.items()
        if (match := re.search(pattern, line))
    ]


def checked() -> list[Path]:
    """Return the files that git tracks, or would track, and that hold prose or code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name and not name.startswith(SKIPPED)]
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file()]


def main() -> int:
    """Print the faults of the files named, or of all."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or checked()
    result = [line for path in paths for line in faults(path)]
    print("\n".join(result) if result else f"{len(paths)} files use the terms of docs/glossary.md")
    return bool(result)


if __name__ == "__main__":
    sys.exit(main())
