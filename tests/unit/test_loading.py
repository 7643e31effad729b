"""Reading a base model takes no more private memory than the requested copy."""

import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT, project_environment

MIB = 2**20
# Reads the model while a thread samples the anonymous memory of the process.
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

measured = {}
for dtype in ("float32", "bfloat16"):
    before, peak, reading = anonymous(), 0, True
    thread = threading.Thread(target=look)
    thread.start()
    model = read(Path(sys.argv[1]), getattr(torch, dtype), "eager")
    reading = False
    thread.join()
    size = sum(parameter.nbytes for parameter in model.parameters())
    measured[dtype] = {"size": size, "peak": peak - before, "after": anonymous() - before}
print(json.dumps(measured))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return the size of a model stored in fp32 and the memory for reading it, by the requested type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes)).save_pretrained(directory)
    command = [sys.executable, "-c", SCRIPT, str(directory)]
    result = subprocess.run(command, env=project_environment(ROOT), capture_output=True, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_model_read_in_its_stored_type_stays_memory_mapped(measured: dict[str, dict[str, int]]) -> None:
    assert measured["float32"]["size"] > 100 * MIB
    assert measured["float32"]["peak"] < 0.2 * measured["float32"]["size"]


def test_converted_model_is_copied_one_tensor_at_a_time(measured: dict[str, dict[str, int]]) -> None:
    """As for a copy to a GPU, no memory beside the copy is used."""
    copied = measured["bfloat16"]
    assert copied["after"] > 0.9 * copied["size"]
    assert copied["peak"] < 1.3 * copied["size"]
