"""zerolora.machine.hosts over a real sshd on two hosts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from bench import Bench
from conftest import Project, project_environment
from hosts import NAMES, Hosts
from test_launchers import TWO_HOSTS, files_of

pytestmark = [pytest.mark.launchers, pytest.mark.slow, pytest.mark.timeout(300)]

LAUNCHER = (sys.executable, "-m", "zerolora.machine.hosts")
WAIT_SECONDS = 60
# Notes that it runs, and the signal that it gets.
WAITING = """
import os, pathlib, signal, sys
own = pathlib.Path("task" + os.environ["PET_NODE_RANK"])
def stop(number, _):
    own.write_text(signal.Signals(number).name)
    sys.exit(75)
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, stop)
own.write_text("runs")
while True:
    signal.pause()
"""


@pytest.fixture
def environment(bench: Bench) -> dict[str, str]:
    return bench.environment


def launched(
    hosts: Hosts, folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return hosts.run("host1", *LAUNCHER, *arguments, directory=folder, environment=environment)


def test_hosts_train_to_the_bytes_of_the_plain_start(hosts: Hosts, bench: Bench, environment: dict[str, str]) -> None:
    plain = bench.run("plain-for-hosts")
    done = launched(hosts, bench.folder, environment, *NAMES, "--", *bench.command("hosts", **TWO_HOSTS))
    assert done.returncode == 0, done.stderr
    assert files_of(bench.folder / "hosts") == files_of(plain)
    assert "host1: step 3/3" in done.stderr


def test_arguments_and_variables_arrive_unchanged(hosts: Hosts, tmp_path: Path, environment: dict[str, str]) -> None:
    """No shell reads them: neither here nor on the hosts."""
    words = ['$HOME `id` "two"', "it's;\n* {a,b}", "", "王 --"]
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['WORDS'], os.environ['PET_NODE_RANK']]))"
    variables = environment | {"WORDS": words[1], "RANK": "7"}
    done = launched(hosts, tmp_path, variables, *NAMES, "--", sys.executable, "-c", code, *words)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split(": ", 1) for line in done.stdout.splitlines())
    assert [[host, json.loads(text)] for host, text in lines] == [
        [host, [words, words[1], str(number)]] for number, host in enumerate(NAMES)
    ]


def test_a_host_that_is_not_reached_is_named_within_seconds(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    start = time.monotonic()
    done = launched(hosts, tmp_path, environment, "host1", "nowhere", "unknown", "--", "true")
    assert time.monotonic() - start < 20
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("zerolora: nowhere: not reached over ssh: ssh: connect to host nowhere"), first
    assert second.startswith("zerolora: unknown: not reached over ssh: ssh: Could not resolve hostname"), second


def test_a_host_without_the_folder_is_named(hosts: Hosts, tmp_path: Path, environment: dict[str, str]) -> None:
    folder, other = tmp_path / "project", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    assert hosts.run("host2", "mount", "--bind", str(other), str(folder)).returncode == 0
    done = launched(hosts, folder, environment, *NAMES, "--", "touch", "begun")
    assert done.returncode == 2
    assert done.stderr == f"zerolora: host2: does not see {folder}; mount the same folder there, at the same path\n"
    assert [*folder.iterdir()] == []


def test_a_host_that_does_not_resolve_the_first_is_named(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = launched(hosts, tmp_path, environment | {"MASTER_ADDR": "unknown"}, "host1", "--", "true")
    assert done.stderr.startswith("zerolora: host1: does not resolve unknown"), done.stderr


def test_the_host_that_failed_is_named_and_the_others_are_ended(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = 'if [ "$PET_NODE_RANK" = 1 ]; then exit 7; fi; echo $$ > other; exec sleep 1000'
    done = launched(hosts, tmp_path, environment, *NAMES, "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (7, "zerolora: host2: the task ended with exit code 7\n")
    assert hosts.run("host1", "kill", "-0", (tmp_path / "other").read_text().strip()).returncode


def test_a_killed_task_is_named_with_its_signal(hosts: Hosts, tmp_path: Path, environment: dict[str, str]) -> None:
    done = launched(hosts, tmp_path, environment, *NAMES, "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode == 137
    assert "the task was ended by SIGKILL" in done.stderr


@pytest.fixture
def waiting(hosts: Hosts, tmp_path: Path, environment: dict[str, str]) -> Iterator[tuple[psutil.Process, Path]]:
    """Return a launcher whose tasks wait on both hosts, and their folder."""
    command = (*LAUNCHER, *NAMES, "--", sys.executable, "-c", WAITING)
    started = subprocess.Popen(
        hosts.command("host1", *command, directory=tmp_path),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: texts(tmp_path) == ["runs", "runs"])
        (launcher,) = [
            each
            for each in psutil.Process(started.pid).children(recursive=True)
            if "zerolora.machine.hosts" in each.cmdline()
        ]
        yield launcher, tmp_path
    finally:
        started.kill()
        started.wait()


def texts(folder: Path) -> list[str]:
    return [path.read_text() for number in range(2) if (path := folder / f"task{number}").exists()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("sent", "arrives"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGKILL", "SIGTERM")])
def test_stop_signals_reach_each_task(waiting: tuple[psutil.Process, Path], sent: str, arrives: str) -> None:
    """Of a launcher that is killed, the end of its connections ends the tasks."""
    launcher, folder = waiting
    os.kill(launcher.pid, signal.Signals[sent])
    wait_until(lambda: texts(folder) == [arrives, arrives])
    wait_until(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["host1", "true"], "give the hosts, then --"),
        (["--", "true"], "no host or no command"),
        (["host1", "--"], "no host or no command"),
        (["host1", "host1", "--", "true"], "host1 is listed twice"),
        (["-oProxyCommand=id", "--", "true"], "'-oProxyCommand=id' is not the name of a host"),
        (["host1,host2", "--", "true"], "'host1,host2' is not the name of a host"),
    ],
)
def test_other_lists_are_refused(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], message: str
) -> None:
    done = subprocess.run(
        [*LAUNCHER, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_the_profile_trains_on_its_hosts(hosts: Hosts, make_project: Callable[[str], Project]) -> None:
    """Snakemake on host1, from an empty project: half a minute."""
    project = make_project("hosts")
    project.config["hardware"]["nodes"] = 2
    project.config["train"] |= {"nodes": 2, "ranks_per_node": 1}
    project.write_config()
    path = project.directory / "profiles/hosts/config.yaml"
    profile = yaml.safe_load(path.read_text())
    launcher = profile["set-resources"]["train"]["launcher"]
    profile["set-resources"]["train"]["launcher"] = launcher.replace("node1 node2", "host1 host2")
    path.write_text(yaml.safe_dump(profile))
    target = "results/default/adapter/manifest.json"
    done = hosts.run(
        *("host1", "snakemake", "--profile", "profiles/hosts", target),
        directory=project.directory,
        environment=project_environment(project.directory),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.directory / target).exists()
    log = (project.directory / "results/logs/train/default.log").read_text()
    assert "host1: Python" in log and "host2: Python" in log
