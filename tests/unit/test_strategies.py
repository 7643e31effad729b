"""The registry of strategies: in an order, described."""

from zerolora import strategies
from zerolora.strategies import STRATEGIES


def test_the_order_is_of_stages_and_names_are_those_of_the_entries() -> None:
    listed = list(STRATEGIES.values())
    assert [each.name for each in listed] == list(STRATEGIES)
    assert [each.stage for each in listed] == sorted(each.stage for each in listed)


def test_a_strategy_is_described_for_the_table() -> None:
    for strategy in STRATEGIES.values():
        assert strategy.about and strategy.sharded and strategy.costs
        assert f"| `{strategy.name}` | {strategy.sharded} | {strategy.costs} |" in strategies.table()
