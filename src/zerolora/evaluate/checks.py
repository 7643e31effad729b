"""How an answer is judged."""

import re

from zerolora.data.reference import PREFIX

_SUM = re.compile(re.escape(PREFIX) + r"(\d+) \+ (\d+)")


def judge(check: str, row: dict[str, str], answer: str) -> tuple[bool, bool]:
    """Return (format right, answer right) for one answer.

    sum (the reference task): the format is the fixed prefix and two numbers, nothing else; right if they also
    sum to the number asked. exact: the format is any text, right if it equals the row's own answer.
    """
    answer = answer.strip()
    if check == "sum":
        match = _SUM.fullmatch(answer)
        asked = row["question"].rstrip("=")
        if match is None:
            return False, False
        return True, asked.isdecimal() and int(match[1]) + int(match[2]) == int(asked)
    return bool(answer), answer == row["expected"].strip()
