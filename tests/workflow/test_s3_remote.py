"""Results pushed to an S3 server on 127.0.0.1 and pulled by a clone, as docs/dvc.md shows it."""

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import BIN, ROOT, Project, project_environment
from engines import dvc_changed, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def answered(endpoint: str, method: str) -> str:
    """Return the answer to a request for the bucket."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
    connection.request(method, "/results")
    with connection.getresponse() as answer:
        assert answer.status == 200
        return answer.read().decode()


@pytest.fixture(scope="module")
def packages() -> str:
    """Return the folder of dvc-s3 and the server; skip these tests where the package index lacks them."""
    result = subprocess.run([ROOT / "tests/s3/install", sys.executable], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no dvc-s3 and moto: tests/s3/install: {result.stderr.strip().splitlines()[-1]}")
    return result.stdout.strip()


@pytest.fixture(scope="module")
def endpoint(packages: str) -> Iterator[str]:
    """Return the URL of a server with an empty bucket, results."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    environment = os.environ | {"PYTHONPATH": packages}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            assert run.stdout
            url = next(match[1] for line in run.stdout if (match := re.search(r"Running on (http://\S+)", line)))
            answered(url, "PUT")
            yield url
        finally:
            run.terminate()


def test_a_clone_has_nothing_to_do_after_a_pull_from_s3(
    copy_finished: Callable[[str], Project], packages: str, endpoint: str, tmp_path: Path
) -> None:
    """Slow: two engines start several times, and dvc-s3 with each command."""
    project = copy_finished("s3")

    def dvc(where: Project, *arguments: str) -> str:
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        paths = {"PYTHONPATH": f"{where.directory / 'src'}{os.pathsep}{packages}"}
        result = subprocess.run(
            [str(BIN / "dvc"), *arguments],
            cwd=where.directory,
            env=project_environment(where.directory) | keys | paths,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout

    dvc(project, "remote", "add", "--default", "store", "s3://results/project")
    dvc(project, "remote", "modify", "store", "endpointurl", endpoint)
    project.commit("finished")
    pushed = dvc(project, "push")
    assert re.search(r"\d+ files? pushed", pushed), pushed
    listed = re.findall(r"<Key>(.*?)</Key>", answered(endpoint, "GET"))
    assert listed and all(key.startswith("project/files/md5/") for key in listed)

    clone = Project(tmp_path / "clone")
    project.run("git", "clone", "--quiet", str(project.directory), str(clone.directory))
    dvc(clone, "pull")
    adapter = "results/default/adapter/adapter_model.safetensors"
    assert (clone.directory / adapter).read_bytes() == (project.directory / adapter).read_bytes()
    assert dvc_changed(clone) == set() and snakemake_would_run(clone) == set()
    assert "Everything is up to date" in dvc(clone, "push")
