"""Two users of a group who share DVC's cache and the store of base weights, as docs/dvc.md shows it."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BIN, ROOT, Project, project_environment
from loopback_hub import REPOSITORY, REVISION, Hub, serving

from zerolora.config.settings import FetchHub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # real processes of both users

GROUP, FIRST, SECOND, OUTSIDER = 54320, 54321, 54322, 54323  # ids need no accounts
# The interpreter may be in root's home: users of the group may read all, and write what is theirs.
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
ADAPTER = "results/default/adapter/adapter_model.safetensors"
WEIGHTS = "weights/model.safetensors"
SETTINGS = FetchHub(repository=REPOSITORY, revision=REVISION, license="MIT").model_dump_json()
FETCH = ("zerolora", "stage", "fetch", "--settings", SETTINGS, "--weights", "weights", "--output", "model")


class Users:
    """Users with a folder each, and one of their group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shared(self, name: str, mode: int = 0o2775) -> Path:
        """Make a folder of the group."""
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, FIRST, GROUP)
        folder.chmod(mode)
        return folder

    def home(self, user: int) -> Path:
        folder = self.folder / str(user)
        folder.mkdir(exist_ok=True)
        os.chown(folder, user, user)
        return folder

    def run(
        self, user: int, *command: str, directory: Path, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user; the outsider is not in the group."""
        rights = ("--clear-groups",) if user == OUTSIDER else (f"--groups={GROUP}", *READING)
        own = {"HOME": str(self.home(user)), "USER": str(user), "PYTHONDONTWRITEBYTECODE": "1"}
        source = directory if (directory / "src").is_dir() else ROOT
        result = subprocess.run(
            ["setpriv", f"--reuid={user}", f"--regid={user}", *rights, *command],
            cwd=directory,
            env=project_environment(source) | own | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if check:
            assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result


@pytest.fixture(scope="module")
def users() -> Iterator[Users]:
    if os.getuid():
        pytest.skip("only root can run commands as two other users")
    with tempfile.TemporaryDirectory(prefix="zl-users") as folder:  # pytest's folders are closed to others
        Path(folder).chmod(0o755)
        yield Users(Path(folder))


def test_a_group_shares_the_cache_of_dvc(users: Users, copy_finished: Callable[[str], Project]) -> None:
    cache = users.shared("cache")
    finished = copy_finished("users").directory
    (finished / ".dvc/config.local").unlink(missing_ok=True)
    first, second = (users.home(user) / "project" for user in (FIRST, SECOND))
    for user, project in ((FIRST, first), (SECOND, second)):
        shutil.copytree(finished, project)
        if user == SECOND:
            for name in ("results", ".dvc/cache"):
                shutil.rmtree(project / name)
        subprocess.run(["chown", "-R", f"{user}:{user}", str(project)], check=True)
        users.run(user, "dvc", "cache", "dir", "--local", str(cache), directory=project)
        users.run(user, "dvc", "config", "--local", "cache.shared", "group", directory=project)
    users.run(FIRST, "dvc", "commit", "--force", directory=first)
    users.run(SECOND, "dvc", "checkout", "--force", directory=second)
    assert (second / ADAPTER).resolve().is_relative_to(cache) or (second / ADAPTER).stat().st_nlink > 1
    assert (second / ADAPTER).read_bytes() == (first / ADAPTER).read_bytes()
    assert json.loads(users.run(SECOND, "dvc", "status", "--json", directory=second).stdout) == {}
    config = second / "config/config.yaml"
    config.write_text(config.read_text().replace("examples: 2", "examples: 1"))
    result = users.run(SECOND, "snakemake", "--profile", "profiles/local", "all", directory=second)
    assert "report default" in result.stderr and "train default" not in result.stderr
    assert json.loads(users.run(SECOND, "dvc", "status", "--json", directory=second).stdout) == {}
    owners = {path.stat().st_uid for path in cache.rglob("*") if path.is_file()}
    assert owners == {FIRST, SECOND}


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    with serving(Hub(files, large=frozenset({"model.safetensors"}))) as hub:
        yield hub


def test_a_group_shares_the_store_of_base_weights(users: Users, hub: Hub) -> None:
    store = users.shared("store")
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "", "ZEROLORA_STORE": str(store)}
    users.run(FIRST, *FETCH, directory=users.home(FIRST), **variables)
    assert "model.safetensors" in hub.downloads()
    hub.asked.clear()
    users.run(SECOND, *FETCH, directory=users.home(SECOND), **variables)
    assert hub.asked == []
    assert (users.home(SECOND) / WEIGHTS).samefile(users.home(FIRST) / WEIGHTS)


def test_a_user_outside_the_group_is_refused_in_one_line(users: Users, hub: Hub) -> None:
    needed = ["sh", "-c", f"exec {BIN / 'python'} -c 'import zerolora'"]
    if (tried := users.run(OUTSIDER, *needed, directory=users.home(OUTSIDER), check=False)).returncode:
        pytest.skip(f"another user cannot run this environment: {tried.stderr.strip().splitlines()[-1]}")
    store = users.shared("closed", 0o2770)
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "", "ZEROLORA_STORE": str(store)}
    result = users.run(OUTSIDER, *FETCH, directory=users.home(OUTSIDER), check=False, **variables)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert line.startswith(f"zerolora: {store}/pins/") and ".json: Permission denied; change its permissions" in line
