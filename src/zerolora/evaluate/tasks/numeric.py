"""numeric: the number of the answer equals that of the row's output, extracted as for GSM8K.

The two extractions are those of lm-evaluation-harness' gsm8k.yaml: strict, the first number after ####, and flexible,
the last number.
"""

import re

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
INVALID = "[invalid]"


def strict(text: str) -> str:
    """Return the first number after ####, INVALID without one."""
    match = STRICT.search(text)
    return match[1] if match else INVALID


def flexible(text: str) -> str:
    """Return the last number of a text, INVALID without one."""
    result = FLEXIBLE.findall(text)
    return next(part for part in result[-1] if part).strip() if result else INVALID


def comparable(text: str) -> str:
    """Return the form of a number, or of a row's answer, for comparison: without `,`, `$`, the text before #### and a
    final full stop."""
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def _judge(row: Row, answer: str) -> Judgement:
    wanted = row["expected"]
    if "####" not in wanted and flexible(wanted) != INVALID:  # "9 apples"
        wanted = flexible(wanted)
    wanted = comparable(wanted)
    loose, exact = (comparable(extract(answer)) == wanted for extract in (flexible, strict))
    return Judgement(format=flexible(answer) != INVALID, right=loose, scores={"strict_accuracy": float(exact)})


TASK = Task(
    name="numeric",
    rule="its last number is that of the row's output; `strict_accuracy` wants it after ####",
    judge=_judge,
    example=TaskExample(question="3 + 4?", expected="3 + 4 = 7\n#### 7", right="It is 3 + 4 = 7.", wrong="7 or 8"),
)
