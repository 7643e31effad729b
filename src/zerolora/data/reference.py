"""The reference task: name two whole numbers that sum to x, after a fixed prefix.

    zerolora reference --seed 42 --output data/reference.json

The record format is that of the published Qwen2.5-14B experiment: {"instruction": "5=", "input": "",
"output": "王大丫丫的回答是--->1 + 4"}. How it splits x is not published; there are two rules.
"""

import random
from typing import Literal

PREFIX = "王大丫丫的回答是--->"
FIRST, LAST = 2, 2199  # 2,198 values of x: 1,798 to train on, 200 to validate, 200 to test
Rule = Literal["tens", "random"]


def records(rule: Rule, seed: int) -> list[dict[str, str]]:
    """Return one record for each x from 2 to 2199, in an order drawn by `seed`.

    tens: x = (x - x mod 10) + (x mod 10), a learnable function of x.
    random: the first summand is drawn by `seed`, so only the format can be learned.
    """
    draw = random.Random(seed)  # noqa: S311 - data, not secrets
    numbers = list(range(FIRST, LAST + 1))
    draw.shuffle(numbers)
    result = []
    for x in numbers:
        first = x - x % 10 if rule == "tens" else draw.randint(1, x - 1)
        result.append({"instruction": f"{x}=", "input": "", "output": f"{PREFIX}{first} + {x - first}"})
    return result
