"""What the operating system refuses, and dates that lead nowhere, end Snakemake with one line and delete nothing."""

import os
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RESOLVED = "results/config.json"


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project with its config resolved."""
    project = make_project("broken")
    project.snakemake(RESOLVED)
    return project


@pytest.fixture
def resolved(project: Project) -> Iterator[Project]:
    """Check that what was there before is still there."""
    before = (project.directory / RESOLVED).read_bytes()
    yield project
    assert (project.directory / RESOLVED).read_bytes() == before


def refused(project: Project, *arguments: str) -> str:
    result = project.snakemake(*arguments, check=False)
    assert result.returncode
    assert "Traceback" not in result.stderr + result.stdout
    return result.stderr


def test_config_that_is_a_directory_is_one_line(resolved: Project) -> None:
    config = resolved.directory / "config/config.yaml"
    text = config.read_text()
    config.unlink()
    config.mkdir()
    try:
        assert "config/config.yaml: is a directory; a file is expected\n" in refused(resolved, RESOLVED)
    finally:
        config.rmdir()
        config.write_text(text)


@pytest.mark.parametrize("name", ["rows.json", RESOLVED])
def test_a_file_dated_in_the_future_is_one_line_and_nothing_is_deleted(resolved: Project, name: str) -> None:
    later = time.time() + 1_000_000
    os.utime(resolved.directory / name, (later, later))
    try:
        assert f"{name}: is dated in the future (" in refused(resolved, RESOLVED)
    finally:
        os.utime(resolved.directory / name)
