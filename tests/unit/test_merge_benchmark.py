"""The benchmark of merging measures what it says, on a model of a few kilobytes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.merge import compare
from zerolora.files import read_json, write_json


@pytest.mark.slow
def test_every_way_is_measured_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five processes that import torch: twenty seconds. One cp is like the other, and one merge without a part."""
    commands = compare.commands
    skipped = ("cp, no reflink", "zerolora, bytes only")

    def fewer(*arguments: Any) -> dict[str, list[str]]:
        return {way: command for way, command in commands(*arguments).items() if way not in skipped}

    monkeypatch.setattr(compare, "commands", fewer)
    options = ["--models", "tiny", "--rounds", "1", "--settle", "0"]
    options += ["--folder", str(tmp_path), "--output", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *options])
    compare.main()
    found = read_json(tmp_path / "out.json", "test")
    model = found["models"]["tiny"]
    assert found["page_cache"] == "warm" and found["versions"]["peft"]
    assert model["same_weights"] is True
    assert model["largest_tensor_bytes"] == 2 * 320 * 64
    ways = model["ways"]
    assert ways["peft"]["rss_bytes"] > ways["zerolora"]["rss_bytes"] > 2**27 > ways["cp"]["rss_bytes"]
    assert ways["zerolora"]["seconds"] > 1 > ways["cp"]["seconds"]
    shares = model["of_copy"]["zerolora, seconds"]
    assert shares["whole"] == ways["cp"]["seconds"] / ways["zerolora"]["seconds"]
    assert compare.markdown(found).count("| tiny |") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_models_are_added_to_a_result_of_the_same_machine_and_options(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"cores": 2, "rank": 16, "models": {"1B": {"bytes": 1}}})
    assert compare.models_of(path, {"cores": 2, "rank": 16, "models": {}}) == {"1B": {"bytes": 1}}
    with pytest.raises(SystemExit, match="rank is 16, and 8 here; leave out --add"):
        compare.models_of(path, {"cores": 2, "rank": 8, "models": {}})
