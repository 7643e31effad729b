"""fp32 matmul on a CPU uses oneDNN's kernels only if they are as exact."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from zerolora.machine import cpu_matmul

GROWN = """
import torch
from zerolora.machine import cpu_matmul

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

chosen, weight = cpu_matmul.choose(), torch.ones(192, 576)
for length in range(1, 101):
    torch.ones(length, 192) @ weight
before = resident()
for length in range(101, 601):
    torch.ones(length, 192) @ weight
print(chosen, resident() - before)
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in cpu_matmul.KEPT:
        monkeypatch.setenv(name, "64")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_chosen_kernels_are_as_exact_as_fp32() -> None:
    chosen = cpu_matmul.choose()
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else "highest")
    one, other = torch.randn(300, 700), torch.randn(700, 200)
    exact = one.double() @ other.double()
    assert ((one @ other - exact).norm() / exact.norm()).item() < 5e-6


def test_inexact_kernels_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AMX, "medium" multiplies in bf16."""
    multiply = torch.Tensor.__matmul__

    def shortened(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if one.dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium":
            one, other = one.bfloat16().float(), other.bfloat16().float()
        return multiply(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", shortened)
    assert not cpu_matmul.choose()
    assert torch.get_float32_matmul_precision() == "highest"


def test_choosing_draws_no_random_number() -> None:
    torch.manual_seed(1)
    cpu_matmul.choose()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


def grown(**environment: str) -> tuple[bool, int]:
    """Return whether oneDNN was chosen, and by how many bytes a process grew over 500 new lengths."""
    kept = {name: value for name, value in os.environ.items() if name not in cpu_matmul.KEPT}
    output = subprocess.run(
        [sys.executable, "-c", GROWN], env=kept | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return output[0] == "True", int(output[1])


def test_kernel_cache_is_bounded() -> None:
    chosen, bounded = grown()
    if chosen:
        # The user's own limit is respected; growth with the default is a seventh to a ninth of it.
        _, unbounded = grown(**dict.fromkeys(cpu_matmul.KEPT, "1024"))
        # Without AVX-512 neither grows: 9 MiB on an EPYC.
        assert bounded < max(unbounded / 4, 16 << 20)
