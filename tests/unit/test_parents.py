"""Commands end with the engine and the shell that started them; real processes are killed."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, project_environment

from zerolora.machine.parents import ENGINE, SHELL

# An engine that names itself and starts the shell of a job; and a job that watches both.
ENGINE_TEXT = """
import subprocess, sys
from zerolora.machine import parents
parents.name_engine()
subprocess.run(["bash", "-c", f"export {parents.SHELL}=$$; echo shell $$; {sys.argv[1]}; echo after"])
"""
JOB_TEXT = """
import os, signal, subprocess, sys, time
from zerolora.machine import parents
if "saves" in sys.argv:
    def stop(*_):
        os.write(1, b"saved\\n")  # print may be running
        os._exit(75)
    signal.signal(signal.SIGTERM, stop)
parents.end_with_engine()
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
print("job", os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def started(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, psutil.Process]]]:
    """Yield an engine, and its shell, job and the job's child once they run."""
    job = f"{sys.executable} -c '{JOB_TEXT}' {' '.join(arguments)}"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE_TEXT, job],
        env=project_environment(ROOT) | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    actual: dict[str, psutil.Process] = {}
    assert engine.stdout
    while "job" not in actual:
        name, pid = engine.stdout.readline().split()
        actual[name] = psutil.Process(int(pid))
    try:
        yield engine, actual
    finally:
        for process in actual.values():
            if process.is_running():
                process.kill()
        engine.kill()
        engine.communicate()


@pytest.mark.parametrize("killed", ["engine", "shell"])
def test_job_and_child_end_with_engine_or_shell(killed: str) -> None:
    with started() as (engine, actual):
        (engine if killed == "engine" else actual["shell"]).kill()
        _, alive = psutil.wait_procs([actual["job"], actual["child"]], timeout=600)
        assert alive == []


@pytest.mark.parametrize("killed", ["engine", "shell"])
def test_job_may_save_its_state_first(killed: str) -> None:
    with started("saves") as (engine, actual):
        (engine if killed == "engine" else actual["shell"]).kill()
        psutil.wait_procs([actual["job"]], timeout=600)
        assert engine.stdout and "saved" in iter(lambda: engine.stdout.readline().strip(), "")  # type: ignore[union-attr]


def job(**variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOB_TEXT],
        env=project_environment(ROOT) | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_job_of_an_ended_engine_does_nothing() -> None:
    text = f"from zerolora.machine import parents; import os; parents.name_engine(); print(os.environ[{ENGINE!r}])"
    named = subprocess.run(
        [sys.executable, "-c", text], env=project_environment(ROOT), capture_output=True, text=True, check=True
    )
    late = job(**{ENGINE: named.stdout.strip()})
    assert late.communicate(timeout=600)[0] == ""
    assert late.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "variables",
    [{}, {ENGINE: "another-machine/1/pid:[2] 1 5"}, {SHELL: "999999"}, {ENGINE: "", SHELL: "999999"}],
    ids=["by hand", "elsewhere", "no engine", "empty"],
)
def test_command_without_engine_watches_nothing(variables: dict[str, str]) -> None:
    """By hand, with nohup or in tmux, or with another machine's environment, as under srun."""
    process = job(**variables)
    assert process.stdout
    lines = [process.stdout.readline().split() for _ in range(2)]
    assert [name for name, _ in lines] == ["child", "job"]
    assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
    os.kill(int(lines[0][1]), signal.SIGKILL)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("killed_before", [True, False], ids=["before Snakemake is loaded", "later"])
def test_engine_ends_with_its_dvc(tmp_path: Path, killed_before: bool) -> None:
    """Also through a shell of any name, and after reparenting."""
    scripts = tmp_path / "workflow/scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "workflow/scripts/rule", scripts)
    # Loading takes until the file `loaded` exists.
    text = (
        "import os, time\n"
        "print(os.getpid(), flush=True)\n"
        "while not os.path.exists('loaded'): time.sleep(0.01)\n"
        "from zerolora.machine import parents\n"
        "parents.end_with_parent()\n"
        "print('watches', flush=True)\n"
        "time.sleep(600)\n"
    )
    (scripts / "engine.py").write_text(text)
    (scripts / "snakemake").write_text(f'#!/bin/sh\nexec "{sys.executable}" workflow/scripts/engine.py\n')
    (scripts / "fish").write_text('#!/bin/sh\n"$@"; true\n')
    for name in ("snakemake", "fish"):
        (scripts / name).chmod(0o755)
    environment = project_environment(ROOT)
    command = ["workflow/scripts/fish", "workflow/scripts/rule", "report"]
    dvc = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command})"],
        cwd=tmp_path,
        env=environment | {"PATH": f"{scripts}{os.pathsep}{environment['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dvc.stdout
    engine = psutil.Process(int(dvc.stdout.readline()))
    if killed_before:
        dvc.kill()
        dvc.wait()
    (tmp_path / "loaded").touch()
    if not killed_before:
        assert dvc.stdout.readline() == "watches\n"
        dvc.kill()
    assert psutil.wait_procs([engine], timeout=600)[1] == []
    assert dvc.communicate()[0] == ""


def test_workers_end_with_their_command() -> None:
    text = (
        "import concurrent.futures, multiprocessing, os, time\n"
        "from zerolora.machine.parents import end_at_parents_death\n"
        "context = multiprocessing.get_context('fork')\n"
        "with concurrent.futures.ProcessPoolExecutor(2, context, end_at_parents_death) as pool:\n"
        "    print(*{pool.submit(os.getpid).result() for _ in range(3)}, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=project_environment(ROOT), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    assert psutil.wait_procs(workers, timeout=600)[1] == []
