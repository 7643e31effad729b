"""The registry of strategies: by file, in an order, described."""

from conftest import ROOT

from zerolora import strategies
from zerolora.strategies import STRATEGIES


def test_every_file_adds_the_strategy_of_its_name() -> None:
    files = {path.stem for path in (ROOT / "src/zerolora/strategies").glob("*.py") if "STRATEGY =" in path.read_text()}
    assert files == set(STRATEGIES)


def test_the_order_is_of_stages_and_no_two_are_equal() -> None:
    listed = list(STRATEGIES.values())
    orders = [each.order for each in listed]
    assert orders == sorted(set(orders))
    assert [each.stage for each in listed] == sorted(each.stage for each in listed)


def test_a_strategy_is_described_for_the_table() -> None:
    for strategy in STRATEGIES.values():
        assert strategy.sharded and strategy.costs
        assert f"| `{strategy.name}` | {strategy.sharded} | {strategy.costs} |" in strategies.table()
