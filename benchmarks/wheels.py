"""Find the packages of the lock that have no wheel for a version of Python on this kind of machine.

    .venv/bin/python benchmarks/wheels.py [--python 3.11.0 3.12 3.13 3.14]

pip resolves envs/requirements.lock for each version without installing anything; the interpreters need not be here. It
reads PyPI alone, whatever pip's settings are. What has no wheel is built from its source when it is installed. Writes
benchmarks/results/wheels.json; minutes for each version.
"""

import datetime
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import RESULTS, ROOT, parser_of

from zerolora.files import as_json, write_json

LOCK = ROOT / "envs/requirements.lock"
VERSIONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")
PIP = ("install", "--isolated", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:")


def main() -> None:
    """Resolve for each version and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--python", nargs="+", default=VERSIONS)
    versions = parser.parse_args().python
    pins = re.findall(r"^\S+==\S+", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    lacking: dict[str, list[str]] = {}
    for version in versions:
        lacking[version] = without_wheel(version, pins, next(reversed(lacking.values()), []))
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": len(pins),
        "without_a_wheel": lacking,
    }
    write_json(RESULTS / "wheels.json", result)
    print(as_json(result))


def without_wheel(version: str, pins: list[str], suspected: list[str]) -> list[str]:
    """Return the pins without a wheel for a version of Python; `suspected` ones are tried one by one first."""
    missing = [pin for pin in suspected if named_missing(version, [pin])]
    while name := named_missing(version, [pin for pin in pins if pin not in missing]):
        missing.append(name)
        print(f"Python {version}: {name} has no wheel", file=sys.stderr, flush=True)
    return sorted(missing)


def named_missing(version: str, pins: list[str]) -> str | None:
    """Return the first of the pins for which pip has no wheel. Exits if pip fails for another reason."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        lock.write_text("\n".join(pins))
        command = [*PIP, "--python-version", version, "--target", folder, "--requirement", str(lock)]
        done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    named = re.search(r"No matching distribution found for (\S+==[^\s;]+)", done.stderr)
    if named is None:
        sys.exit(f"pip for Python {version}: {done.stderr[-2000:]}")
    return named[1]


if __name__ == "__main__":
    main()
