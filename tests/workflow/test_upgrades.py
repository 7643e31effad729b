"""What an upgrade of the project's own code runs again: in both engines, on a finished and on an unfinished run."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import made_up
import pytest
from conftest import Project, project_environment
from engines import (
    dvc_changed,
    dvc_ran,
    edges_of,
    edit_config,
    snakemake_ran,
    snakemake_would_run,
    with_followers,
)

pytestmark = pytest.mark.slow

ENGINE = '''"""An engine that no strategy names."""

from zerolora.train.engines.ddp import DDP


class Idle(DDP):
    """The same."""
'''
NEW_KEYS = {
    "config/schema.py": (
        ("class TrainSection(MethodSections, ObjectiveSections):", "    spare: int = 1\n    '''Spare.'''\n"),
        ("class PrepareSection(Section):", "    spare: str = ''\n    '''Spare.'''\n"),
        ("class Pack(Section):", "    spare: bool = False\n    '''Spare.'''\n"),
        ("class EvaluateSection(Section):", "    spare: bool = False\n    '''Spare.'''\n"),
        ("class Merge(Section):", "    spare: bool = False\n    '''Spare.'''\n"),
    ),
    "config/settings.py": (
        ("class EstimateSettings(Section):", "    spare: bool = False\n"),
        ("class TrainingChoice(Section):", "    spare_choice: bool = False\n"),
    ),
    "config/method_sections.py": (("class Lora(Section):", "    spare: int = 1\n    '''Spare.'''\n"),),
}
REMARKED = ("train/feed.py", "data/records.py", "model/read_spec.py", "merge/merge_plan.py")


class Upgrade:
    """Edits of a project's own code, which are undone."""

    def __init__(self, project: Project) -> None:
        self.source = project.directory / "src/zerolora"
        self.before: dict[Path, str | None] = {}

    def text(self, path: str) -> str:
        """Return the text of a file of the package; "" if there is none."""
        file = self.source / path
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def write(self, path: str, text: str) -> None:
        """Write a file of the package."""
        file = self.source / path
        self.before.setdefault(file, file.read_text(encoding="utf-8") if file.exists() else None)
        file.write_text(text, encoding="utf-8")

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace the first occurrence of a text in a file of the package."""
        text = (self.source / path).read_text(encoding="utf-8")
        assert old in text, (path, old)
        self.write(path, text.replace(old, new, 1))

    def undo(self) -> None:
        """Undo all edits."""
        for file, text in self.before.items():
            file.unlink() if text is None else file.write_text(text, encoding="utf-8")
        self.before = {}
        for folder in self.source.parent.glob("made_up*"):
            shutil.rmtree(folder)


def neutral_upgrade(upgrade: Upgrade) -> None:
    """Install a package with entries, and add an engine, a key at its default to each kind of section, and remarks."""
    points = {group: each for group, each in made_up.ENTRY_POINTS.items() if group != "zerolora.strategies"}
    made_up.install(upgrade.source.parent, points)
    upgrade.write("train/engines/idle.py", ENGINE)
    for path, keys in NEW_KEYS.items():
        for section, key in keys:
            text = (upgrade.source / path).read_text(encoding="utf-8")
            head = re.search(rf'{re.escape(section)}\n    """.*?"""\n', text, re.S)
            assert head, section
            upgrade.write(path, text.replace(head[0], f"{head[0]}\n{key}", 1))
    for path in REMARKED:
        upgrade.write(path, f"{upgrade.text(path)}\n# A remark.\n")


@pytest.fixture(scope="module")
def finished(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished and DVC has recorded."""
    project = copy_finished("upgraded")
    assert dvc_changed(project) == set()
    return project


@pytest.fixture
def upgrade(finished: Project) -> Iterator[Upgrade]:
    """Return edits of that project's code."""
    edits = Upgrade(finished)
    yield edits
    edits.undo()


def test_unused_registry_entries_rerun_nothing(finished: Project, upgrade: Upgrade) -> None:
    """`resolve`, which writes the fingerprints, is all that may run."""
    adapter = finished.directory / "results/default/adapter/adapter_model.safetensors"
    before = adapter.stat().st_mtime_ns
    neutral_upgrade(upgrade)
    assert snakemake_would_run(finished) <= {"resolve"}
    assert snakemake_ran(finished) <= {"resolve"}
    assert dvc_ran(finished) <= {"resolve"}
    assert dvc_changed(finished) == snakemake_would_run(finished) == set()
    assert adapter.stat().st_mtime_ns == before
    upgrade.undo()
    assert snakemake_ran(finished) <= {"resolve"}
    assert dvc_changed(finished) == set()


def test_a_new_key_of_the_choice_trains_nothing_where_render_runs_again(finished: Project, upgrade: Upgrade) -> None:
    neutral_upgrade(upgrade)
    upgrade.replace("planner/choice.py", "\nfrom ", "\nSPARE = 1\nfrom ")
    assert dvc_ran(finished) == {"resolve", "render@default"}
    assert snakemake_would_run(finished) == set()
    upgrade.undo()
    snakemake_ran(finished)
    assert dvc_changed(finished) == set()


def test_a_new_strategy_is_estimated_and_trains_nothing(finished: Project, upgrade: Upgrade) -> None:
    """estimate.json has a row for each strategy, so what reads it runs again, in seconds."""
    idle = 'DeepSpeed(name="idle", about="", sharded="optimizer states", costs="nothing", stage=1),'
    first = "        DistributedDataParallel("
    upgrade.replace("strategies/__init__.py", first, f"        {idle}\n{first}")
    assert dvc_ran(finished) == {"resolve", *(f"{stage}@default" for stage in ("estimate", "render", "report"))}
    assert snakemake_would_run(finished) == set()
    upgrade.undo()
    snakemake_ran(finished)
    assert dvc_changed(finished) == set()


@pytest.mark.parametrize(
    ("edits", "stages"),
    [
        (
            [("methods/lora.py", "\nfrom dataclasses", "\nSPARE = 1\nfrom dataclasses")],
            ("estimate", "render", "train", "merge"),
        ),
        (
            [
                ("methods/dora.py", "\nfrom dataclasses", "\nSPARE = 1\nfrom dataclasses"),
                ("train/engines/fsdp.py", "\nimport ", "\nSPARE = 1\nimport "),
                (
                    "config/schema.py",
                    'Field(gt=0)] | None = None\n    """Peak',
                    'Field(gt=0)] | None = 2.0\n    """Peak',
                ),
            ],
            (),
        ),
        ([("train/engines/deepspeed.py", "\nfrom ", "\nSPARE = 1\nfrom ")], ("train",)),
        (
            [("config/schema.py", "weight_decay: Annotated[float, Field(ge=0)] = 0.0", "weight_decay: float = 0.3")],
            ("train",),
        ),
    ],
    ids=["method", "not chosen", "engine", "default"],
)
def test_a_changed_constant_runs_its_stages_again(
    finished: Project, upgrade: Upgrade, edits: list[tuple[str, str, str]], stages: tuple[str, ...]
) -> None:
    for edit in edits:
        upgrade.replace(*edit)
    expected = {f"{stage}@default" for stage in stages}
    shown = snakemake_would_run(finished) - {"resolve"}
    assert shown == with_followers(edges_of(finished), expected)
    finished.run("workflow/scripts/rule", "resolve", "results/config.json")
    assert dvc_changed(finished) - {"resolve"} == expected
    upgrade.undo()
    finished.run("workflow/scripts/rule", "resolve", "results/config.json")


def test_an_unfinished_run_resumes(finished: Project, upgrade: Upgrade) -> None:
    original = json.loads(json.dumps(finished.config))
    edit_config(finished, **{"train.max_steps": 200})
    checkpoints = finished.directory / "work/checkpoints/default"
    before = {*checkpoints.rglob("step-*.safetensors")}
    process = subprocess.Popen(
        ["snakemake", "--profile", "profiles/local", "all"],
        cwd=finished.directory,
        env=project_environment(finished.directory),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not {*checkpoints.rglob("step-*.safetensors")} - before:
        assert process.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    neutral_upgrade(upgrade)
    edit_config(finished, **{"train.max_steps": 200})
    assert "train@default" in snakemake_ran(finished)
    log = (finished.directory / "results/logs/train/default.log").read_text(encoding="utf-8")
    assert re.search(r"resuming at step \d+ of \d+", log), log
    finished.config = original
    finished.write_config()
