"""The folder of a rebuild: the code and the config as recorded, the pinned inputs, and the commands that run there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zerolora.config.stages import ALL_STAGES, USER_FOLDERS
from zerolora.errors import UserError, shown
from zerolora.files import read_object, sha256, write_json, write_text
from zerolora.git_environment import git_environment
from zerolora.judge.work_file import NEVER
from zerolora.publish.record import RawInput, kept_replies, raw_inputs, texts_in
from zerolora.rebuild.original import Original
from zerolora.rebuild.other_rows import first_other_row
from zerolora.search.rounds import run_to_end
from zerolora.train.launch.stop_signals import Stopped
from zerolora.workflow_files import ROOT

STATE = "rebuild-of.json"
"""In the folder: what it rebuilds."""
PROFILE = "profiles/local"
LONGEST_LINE = 16 << 20
"""Bytes of the line by which a file of replies is known."""
LINKED = 64 << 20
"""Bytes from which an input is linked, not copied, where the file system allows it."""
OWN_RECORDS = (".dvc", "dvc.yaml", "dvc.lock")
"""What DVC knows of a project, by which a run would take results instead of computing them."""
WRITTEN = tuple(
    sorted({path.partition("{")[0] for stage in ALL_STAGES.values() for path in (*stage.files.values(), *stage.writes)})
)
"""Beginnings of the paths that stages write, where a push must not place a file: a checkpoint would be resumed."""


def make_folder(original: Original, folder: Path, given: Sequence[Path]) -> None:
    """Make the folder of a rebuild, whole or not at all; keep one of the same original, which is continued.

    `given`: files and directories with pinned inputs. Raises UserError if an input is missing or another one, or the
    folder is of something else.
    """
    if folder.exists():
        state = read_object(folder / STATE, "zerolora rebuild") if (folder / STATE).is_file() else {}
        if state.get("digest") != original.digest:
            raise UserError(
                f"--output {folder}: already exists, and is no rebuild of {original.source} as it is now; remove it, "
                "or name another directory"
            )
        return
    _check_given(original, given)
    _check_config(original)
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        if original.record:
            _write_record(original, unfinished)
        else:
            _copy_project(original, unfinished)
        _bring_inputs(original, unfinished / original.prefix, given)
        _bring_replies(original, unfinished / original.prefix, given)
        write_json(unfinished / STATE, {"source": original.source, "digest": original.digest})
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_given(original: Original, given: Sequence[Path]) -> None:
    """Raise UserError for a given path without a pinned file."""
    pinned = {raw.sha256: raw for raw in raw_inputs(original.receipts)}
    for path in given:
        files = _files_of(path)
        if any(sha256(file) in pinned for file in files):
            continue
        if kept_replies(original.receipts) and any(map(_has_replies, files)):
            continue
        alike = next((raw for raw in pinned.values() for file in files if Path(raw.path).name == file.name), None)
        raw = alike or next((raw for raw in pinned.values() if raw.stage.startswith("prepare")), None)
        if raw is None or not files:
            raise UserError(f"{path}: has no file that {original.source} was made of; leave the option out")
        raise UserError(_unlike(original, raw, files[0] if len(files) == 1 else path))


def _check_config(original: Original) -> None:
    """Raise UserError for a pushed config that names a file or directory of this machine outside of the folder."""
    for text in texts_in(original.record.config) if original.record else ():
        path = Path(text)
        if (text.startswith(("/", "~")) or ".." in path.parts) and _exists(path):
            raise UserError(
                f"{original.source}: its config names {shown(text)}, a path of this machine, and what a push needs is "
                "below its folder; do not rebuild it"
            )


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _bring_inputs(original: Original, folder: Path, given: Sequence[Path]) -> None:
    """Place each pinned input in the folder. Raises UserError if one is missing or another."""
    brought = {sha256(file): file for path in given for file in _files_of(path)}
    for raw in raw_inputs(original.receipts):
        outside = Path(raw.path).expanduser().is_absolute() or ".." in Path(raw.path).parts
        if original.record and (outside or not _may_be_input(raw.path)):
            raise UserError(f"{original.source}: its record has the input {raw.path}, where no rows or models can be")
        place = folder / raw.path if not outside else Path(raw.path)
        candidates = [place, *([] if outside else [brought.get(raw.sha256), original.find(raw.path)])]
        candidates += [] if original.record else [Path(raw.path)]
        present = [file for file in candidates if file and file.is_file()]
        file = next((each for each in present if sha256(each) == raw.sha256), None)
        if file is None:
            named = next((each for each in present if each != place), None) if present else None
            raise UserError(_unlike(original, raw, named or (Path(raw.path) if present else None)))
        if file != place:
            _place(file, place)


def _bring_replies(original: Original, folder: Path, given: Sequence[Path]) -> None:
    """Place what served models replied where the stages look for it: a reply is found by what was asked, so all files
    of replies are as good as one. Raises UserError if there is none."""
    brought = [file for path in given for file in _files_of(path) if _has_replies(file)]
    for path, stage in kept_replies(original.receipts).items():
        own = [] if original.record else [Path(path)]
        files = [file for file in (*own, *original.replies, *brought) if file.is_file() and _has_replies(file)]
        if not files:
            raise UserError(
                f"{path}: {stage} asked a served model, which is not asked again, and the file of its replies is not "
                "here; pass --rows with it"
            )
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"".join(file.read_bytes().removesuffix(b"\n") + b"\n" for file in files))


def _has_replies(file: Path) -> bool:
    """Return whether a file is one of kept replies, by its first line."""
    with file.open("rb") as lines:
        line = lines.readline(LONGEST_LINE)
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and {"key", "messages"} <= value.keys()


def _may_be_input(path: str) -> bool:
    hidden = any(part.startswith(".") for part in Path(path).parts)
    return not hidden and Path(path).parts[0] != "config" and not path.startswith(WRITTEN)


def _unlike(original: Original, raw: RawInput, file: Path | None) -> str:
    """Return the line about an input that is missing, or another than the pinned one."""
    option = "--model" if raw.stage.startswith("fetch") else "--rows"
    if file is None:
        return (
            f"{raw.path}: {raw.stage} read it, and it is not here; pass {option} with the file or the directory that "
            f"has it, sha256 {raw.sha256}"
        )
    return (
        f"{file}: is not what {raw.stage} read as {raw.path}{_other_row(original, raw, file)}; pass {option} with the "
        f"file of sha256 {raw.sha256}"
    )


def _other_row(original: Original, raw: RawInput, file: Path) -> str:
    """Return which row of a file is the first that differs from the pinned one, if that is at hand, too."""
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder, Path(raw.path).name)
        if (found := original.find(raw.path)) and sha256(found) == raw.sha256:
            shutil.copyfile(found, pinned)
        elif original.commit:
            committed = ["git", "show", f"{original.commit}:./{raw.path}"]
            shown_by_git = subprocess.run(committed, capture_output=True, check=False, env=git_environment())
            pinned.write_bytes(shown_by_git.stdout)
        if not pinned.is_file() or sha256(pinned) != raw.sha256 or not file.is_file():
            return ""
        number = first_other_row(pinned, file, table=False)
    return "" if number is None else f": row {number:,} is the first that differs"


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory; correct the path")
    return [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else [path]


def _write_record(original: Original, folder: Path) -> None:
    assert original.record
    record = original.record
    for name, text in record.files.items():
        parts = Path(name).parts
        if parts[0] != "config" or parts[1] not in USER_FOLDERS or ".." in parts:
            raise UserError(f"{original.source}: its record has the file {name}, which is none of a config's files")
        write_text(folder / name, text)
    write_text(folder / "config/config.yaml", yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True))
    write_text(folder / "envs/requirements.lock", record.lock)


def _copy_project(original: Original, folder: Path) -> None:
    """Write the project at the original's commit, with what is not committed if it is the working tree's."""
    if original.commit is None:  # not in git
        _copy_edited(original, folder)
        return
    _git("clone", "--quiet", "--no-checkout", _git("rev-parse", "--show-toplevel"), str(folder))
    _git("-C", str(folder), "checkout", "--quiet", "--detach", original.commit)
    project = folder / original.prefix
    _copy_edited(original, project)
    for name in OWN_RECORDS:
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _copy_edited(original: Original, folder: Path) -> None:
    """Copy what is not committed, if the original is the working tree."""
    for name, digest in (original.edited or {}).items():
        (folder / name).unlink(missing_ok=True)
        if digest is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)


def _place(file: Path, path: Path) -> None:
    """Link or copy a file to a path; one that is there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if file.stat().st_size >= LINKED:
        try:
            os.link(file.resolve(), path)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(file, path)


def run_targets(original: Original, folder: Path, targets: Sequence[str], keep_checkpoints: int | None) -> None:
    """Run the pipeline in the folder up to these files. Raises UserError if it fails, Stopped if it is stopped."""
    more = ["--set-resources", f"train:keep_checkpoints={keep_checkpoints}"] if keep_checkpoints else []
    if original.record:  # a push brings no workflow
        profile = [] if "SNAKEMAKE_PROFILE" in os.environ else ["--profile", str(ROOT / PROFILE)]
        start = ["zerolora", "run", "--snakefile", str(ROOT / "workflow/Snakefile"), *profile]
    else:
        start = ["snakemake", "--profile", PROFILE] if (folder / "Snakefile").is_file() else ["zerolora", "run"]
    command = [sys.executable, "-m", *start, *targets, *more]
    run_command(original, folder, command, "the rebuild failed; see the message above")


def run_command(original: Original, folder: Path, command: Sequence[str], failure: str) -> None:
    """Run a command in the folder, with the code there. Raises UserError, with a text, if it fails."""
    code, stopped = run_to_end(command, cwd=folder, env=environment(original, folder))
    if stopped:
        raise Stopped(f"stopped; {folder} keeps what is done, and the same command continues")
    if code:
        raise UserError(f"{failure}; the same command continues in {folder}")


def environment(original: Original, folder: Path) -> Mapping[str, str]:
    """Return the variables of commands in the folder: for a run of a project its own code first, if it has some."""
    result: dict[str, str] = {**git_environment(), NEVER: "1"}
    if original.record:
        result["PYTHONSAFEPATH"] = "1"  # the folder is data from outside: nothing in it is imported
    if original.record is None and (folder / "src/zerolora").is_dir():
        before = result.get("PYTHONPATH")
        result["PYTHONPATH"] = os.pathsep.join([str(folder.resolve() / "src"), *([before] if before else [])])
    return result


def settings_now(folder: Path, stage: str, names: Mapping[str, str], key: str) -> Any:
    """Return a stage's settings as `resolve` has written them in the folder; None if it has not."""
    group, *keys = (part.format(**names) for part in key.split("."))
    shared = group in ("runs", "shared")
    file = folder / (f"results/settings/{group}/{keys[0]}.json" if shared else "results/config.json")
    value: Any = read_object(file, "zerolora stage resolve") if file.is_file() else None
    for part in (group, *keys):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=git_environment())
    if result.returncode:
        raise UserError(f"git {arguments[0]}: {(result.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return result.stdout.removesuffix("\n")
