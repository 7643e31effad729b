"""What ranks write to the store of the rendezvous: signed, with a secret that all of them and nobody else have."""

import os
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.train.launch.heartbeat import Status
from zerolora.train.launch.signed import SECRET, common_secret, signed, verified
from zerolora.train.launch.topology import topology, with_secret

STATUS = asdict(Status(1, "node1", "step 2, forward", "step", 5, 4, 0.5, 1, 0.25))


@given(st.binary(max_size=200))
def test_only_what_a_rank_signed_for_a_key_is_read(foreign: bytes) -> None:
    ours = signed("a/1", STATUS).encode()
    assert verified("a/1", ours) == STATUS
    assert verified("a/2", ours) is None and verified("a/1", ours[:-1]) is None
    assert verified("a/1", foreign) is None and verified("a/1", ours[:64] + foreign) in (None, STATUS)


def test_another_secret_signs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "one")
    ours = signed("a", 1).encode()
    monkeypatch.setenv(SECRET, "two")
    assert verified("a", ours) is None
    monkeypatch.delenv(SECRET)
    assert verified("a", signed("a", 1).encode()) == 1, "without a secret all are equal, and trusted"


WRONG: list[Any] = [
    None, [], "x", {}, {"x": 1}, STATUS | {"longest": "zz"}, STATUS | {"rank": 2}, STATUS | {"sent": True},
    STATUS | {"turns": -1}, STATUS | {"seconds": float("inf")}, STATUS | {"longest": float("nan")},
    STATUS | {"kind": "other"}, STATUS | {"kind": []}, STATUS | {"host": 5}, STATUS | {"part": "x" * 1000},
    STATUS | {"more": 1}, {key: value for key, value in STATUS.items() if key != "host"},
]  # fmt: skip


def test_a_status_is_checked_before_it_is_believed() -> None:
    assert Status.of(STATUS, 1) == Status(**STATUS)
    assert [value for value in WRONG if Status.of(value, 1) is not None] == []
    escaped = Status.of(STATUS | {"host": "\x1b[31mnode\n"}, 1)
    assert escaped and escaped.host == r"\x1b[31mnode\n"


def test_processes_that_start_together_have_one_secret(tmp_path: Path) -> None:
    """As the tasks of srun: eight processes ask at once."""
    text = "import sys; from pathlib import Path; from zerolora.train.launch.signed import common_secret as f; "
    text += "sys.stdin.read(1); print(f(Path(sys.argv[1])))"
    line = [sys.executable, "-c", text, str(tmp_path / "checkpoints")]
    tasks = [subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    secrets = {task.communicate("x")[0].strip() for task in tasks}
    (secret,) = secrets
    assert len(secret) == 64
    (file,) = (tmp_path / "checkpoints").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert common_secret(tmp_path / "checkpoints") == secret, "a resumed training has the same"


def test_a_file_that_others_can_read_holds_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert common_secret(tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(0o644)
    assert common_secret(tmp_path) == "" and "is not a secret of this user alone; delete it" in caplog.text
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        common_secret(tmp_path)


def test_where_the_secret_comes_from(tmp_path: Path) -> None:
    """A new one from a launcher of all ranks; else the environment's, or the folder's; none for a single rank."""
    own = [with_secret(topology({}, 1, 2), {SECRET: "x"}, tmp_path).secret for _ in range(2)]
    assert len({*own, "x", ""}) == 4 and not [*tmp_path.iterdir()]
    assert own[0] not in repr(topology({}, 1, 2))
    assert with_secret(topology({}, 1, 1), {SECRET: "x"}, tmp_path).secret == ""
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = topology(torchrun, 1, 2)
    assert with_secret(place, {SECRET: "x"}, tmp_path).secret == "x"  # noqa: S105
    found = with_secret(place, {}, tmp_path)
    assert found.secret == common_secret(tmp_path) and found.environment(1)[SECRET] == found.secret
    assert os.environ.get(SECRET) is None
