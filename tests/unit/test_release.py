"""What a release consists of: one version in every file, and an entry that the workflow catalog takes."""

import re
import tomllib

import yaml
from conftest import ROOT

import zerolora

RELEASE = re.compile(r"## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)")


def test_all_files_have_the_version_of_the_newest_release() -> None:
    """Work since then is under `## Unreleased`, above it."""
    headings = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    releases = [RELEASE.fullmatch(heading) for heading in headings if heading != "## Unreleased"]
    assert "## Unreleased" not in headings[1:] and all(releases)
    released = [(tuple(map(int, each[1].split("."))), each[2]) for each in releases if each]
    assert released == sorted(set(released), reverse=True), "the newest first"
    newest = releases[0]
    assert newest is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {project["version"], str(citation["version"]), zerolora.__version__} == {newest[1]}
    assert citation["date-released"] == newest[2] and citation["license"] == project["license"]
    assert f"| zerolora | {newest[1]} |" in (ROOT / "docs/peers.md").read_text(encoding="utf-8")


def test_the_workflow_catalog_takes_the_repository() -> None:
    """By the rules in the README.md of snakemake/snakemake-workflow-catalog; snakedeploy copies `profiles`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    assert "snakemake" in readme and "workflow" in readme
    assert (ROOT / "workflow/Snakefile").is_file() and (ROOT / "config/README.md").is_file()
    rules = sorted((ROOT / "workflow/rules").glob("*.smk"))
    assert rules
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8")).pop("usage")
    assert usage.keys() == {"mandatory-flags", "software-stack-deployment"}
    assert usage["mandatory-flags"].keys() == {"desc", "flags"}
    option, profile = usage["mandatory-flags"]["flags"].split()
    assert option == "--profile" and (ROOT / profile / "config.yaml").is_file()
    software = usage["software-stack-deployment"]
    # tests/workflow/test_from_elsewhere.py makes the report
    assert software == {"conda": False, "apptainer": False, "apptainer+conda": False, "report": True}
    directives = re.compile(r"^\s*(conda|container|containerized):", re.MULTILINE)
    assert not [path.name for path in rules if directives.search(path.read_text(encoding="utf-8"))]
