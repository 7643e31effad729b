"""How much of a process's own memory it takes to read a base model: no more than the copy that is asked for."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, project_environment

MIB = 2**20
# Reads the model, while a thread looks at the process's anonymous pages: those that no file backs.
SCRIPT = """
import json, re, sys, threading, time, torch
from pathlib import Path
from zerolora.train.base_model import read

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def look():
    global peak
    while reading:
        peak = max(peak, anonymous())
        time.sleep(0.001)

found = {}
for dtype in ("float32", "bfloat16"):
    before, peak, reading = anonymous(), 0, True
    thread = threading.Thread(target=look)
    thread.start()
    model = read(Path(sys.argv[1]), getattr(torch, dtype), "eager")
    reading = False
    thread.join()
    size = sum(parameter.nbytes for parameter in model.parameters())
    found[dtype] = {"size": size, "peak": peak - before, "held": anonymous() - before}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return the bytes of a model that is stored in fp32, and those that reading it took, by the type it is read in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    command = [sys.executable, "-c", SCRIPT, str(directory)]
    result = subprocess.run(command, env=project_environment(ROOT), capture_output=True, text=True, check=True)
    measured: dict[str, dict[str, int]] = json.loads(result.stdout.splitlines()[-1])
    return measured


def test_a_model_read_as_it_is_stored_stays_in_the_pages_of_its_file(found: dict[str, dict[str, int]]) -> None:
    assert found["float32"]["size"] > 100 * MIB
    assert found["float32"]["peak"] < 0.2 * found["float32"]["size"]


def test_a_model_that_is_copied_is_copied_a_tensor_at_a_time(found: dict[str, dict[str, int]]) -> None:
    """As to a GPU, where the copy is not in the host's memory: beside the copy nothing is held."""
    copied = found["bfloat16"]
    assert copied["held"] > 0.9 * copied["size"]
    assert copied["peak"] < 1.3 * copied["size"]
