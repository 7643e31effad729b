"""The command `zerolora memory` on damaged model files: an estimate or one line, and never for long.

Over five seconds in all, for hundreds of damaged files.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_shapes import OTHERS

from zerolora.cli import app
from zerolora.errors import UserError
from zerolora.model.families import FAMILIES
from zerolora.strategies import STRATEGIES

PUBLISHED = [json.loads(path.read_text()) for path in sorted((ROOT / "config/recipes/models").glob("*.json"))]
KNOWN = [config for config in PUBLISHED if config["model_type"] in FAMILIES]
DROPPED = object()
VALUES = st.one_of(
    st.just(DROPPED),
    st.integers(-1, 9),
    st.sampled_from([10**5, 10**9, 2**31, 2**63, 10**30, -(10**12)]),
    st.floats(),
    st.text(max_size=8),
    st.booleans(),
    st.none(),
    st.builds(lambda: [1, 1, 1]),
    st.builds(lambda: {"a": {}}),
)
SECONDS = 8
"""Of CPU time; no damage may take longer than refusing it."""


@st.composite
def damaged(draw: st.DrawFn, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a config with up to three keys, of any depth, changed or left out."""
    config: dict[str, Any] = json.loads(json.dumps(configs[draw(st.integers(0, len(configs) - 1))]))
    for _ in range(draw(st.integers(1, 3))):
        part = config
        while True:
            key = draw(st.sampled_from(sorted(part)))
            if not isinstance(part[key], dict) or not part[key] or draw(st.booleans()):
                break
            part = part[key]
        value = draw(VALUES)
        if value is DROPPED:
            del part[key]
        else:
            part[key] = value
        if not part:
            break
    return config


def answered(path: Path, config: Any, *options: str) -> str:
    """Run the command on a config, and return its one line, or "" after an estimate."""
    path.write_text(json.dumps(config))
    begun = time.process_time()
    try:
        app(["memory", "--model", str(path), *options], standalone_mode=False)
        said = ""
    except UserError as error:
        said = str(error)
        assert said.startswith(f"{path}: ") or "adapts" in said, said
    assert len(said.splitlines()) <= 1 and said.isprintable()
    assert time.process_time() - begun < SECONDS
    return said


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@given(
    config=damaged(KNOWN), strategy=st.sampled_from(list(STRATEGIES)), method=st.sampled_from(["lora", "ia3", "full"])
)
@settings(FUZZ, max_examples=200)
def test_a_damaged_file_of_a_known_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], strategy: str, method: str
) -> None:
    answered(tmp_path / "config.json", config, "--strategy", strategy, "--method", method)
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 120


@given(config=damaged(OTHERS))
@settings(FUZZ, max_examples=40)
def test_a_damaged_file_that_is_built_on_the_meta_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    answered(tmp_path / "config.json", config, "--strategy", "zero2")
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 120
