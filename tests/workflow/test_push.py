"""`zerolora push` of a run that the whole pipeline made: to a directory, to a loopback hub, and what it refuses."""

import json
from collections.abc import Callable

import pytest
from conftest import Project
from engines import snakemake_ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def finished(make_project: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended well; a run of the whole pipeline takes half a minute."""
    project = make_project("push")
    snakemake_ran(project)
    return project


def test_an_adapter_in_a_directory(finished: Project) -> None:
    result = finished.run("zerolora", "push", "--run", "default", "--what", "adapter", "--to", "../out")
    print(result.stdout, result.stderr)
    print((finished.directory / "../out/README.md").read_text())
    print(json.loads((finished.directory / "../out/manifest.json").read_text()))
