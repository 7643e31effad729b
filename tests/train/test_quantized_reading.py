"""4-bit bases that ranks read shard by shard."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import Bench
from conftest import ROOT, project_environment

from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STRATEGIES = ("zero3", "zero3_offload", "zero3_hpz", "fsdp", "fsdp_offload", "fsdp_hybrid")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{strategy} {precision} {storage}": (
        strategy,
        {"precision": precision, "quantization": {"type": "nf4", "storage": storage}},
    )
    for strategy in STRATEGIES
    for precision, storage in (("fp32", "auto"), ("bf16", "auto"), ("bf16", "uint8"))
}
CASES["fp4, single"] = ("zero3", {"quantization": {"type": "fp4", "double": False}})
SAVED = {"lora": {"r": 4, "modules_to_save": ["norm"]}}
MARKED = {"data": "marked", "packing": "marked-packing"}
for strategy in ("zero3", "fsdp"):
    CASES[f"{strategy}, saved modules"] = (strategy, SAVED)
    CASES[f"{strategy}, added tokens"] = (strategy, MARKED)


@pytest.fixture(scope="module")
def readings(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[float]]]]:
    """Return each rank's losses of each case by reading, of two ranks that train all of them."""
    folder = tmp_path_factory.mktemp("readings")
    bench.mark()
    request = {}
    for name, (strategy, settings) in CASES.items():
        command = bench.command(f"read-{name}", strategy, method="qlora", **settings)
        options = dict(zip(command[2::2], command[3::2], strict=True))
        train = json.loads(options.pop("--settings"))
        request[name] = {"settings": train, "paths": {key[2:]: path for key, path in options.items()}}
    (folder / "request.json").write_text(json.dumps(request))
    where = topology({}, 1, 2)
    script = Path(__file__).with_name("two_readings.py")
    environment = project_environment(ROOT) | CPU_MALLOC | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder / "request.json"), str(folder)]
    with (folder / "log").open("wb") as log:
        processes = [where.start(rank, command, environment, log) for rank in where.ranks]
        codes = [process.wait() for process in processes]
    assert codes == [0, 0], (folder / "log").read_text()[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in where.ranks]


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_a_model_read_whole(name: str, readings: list[dict[str, dict[str, list[float]]]]) -> None:
    for rank in readings:
        assert rank[name]["shards"] == rank[name]["whole"]
        assert len(set(rank[name]["whole"])) == 4
