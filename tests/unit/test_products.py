"""fp32 products on a CPU: by the faster kernels only where these are as exact."""

from collections.abc import Iterator

import pytest
import torch

from zerolora import products


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_what_is_chosen_is_as_exact_as_fp32() -> None:
    chosen = products.choose()
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else "highest")
    one, other = torch.randn(300, 700), torch.randn(700, 200)
    exact = one.double() @ other.double()
    assert ((one @ other - exact).norm() / exact.norm()).item() < 5e-6


def test_where_factors_are_shortened_torchs_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with AMX: "medium" multiplies in bf16."""
    multiply = torch.Tensor.__matmul__

    def shortened(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if one.dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium":
            one, other = one.bfloat16().float(), other.bfloat16().float()
        return multiply(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", shortened)
    assert not products.choose()
    assert torch.get_float32_matmul_precision() == "highest"


def test_no_random_number_is_drawn() -> None:
    torch.manual_seed(1)
    products.choose()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
