"""The split that the name of a file, a folder or a row's split contains.

The names are those of the Hugging Face hub (`datasets`, data_files.py), and usual ones beside: a word of KEYWORDS,
between characters that are no letters or in testData.
"""

import re

KEYWORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "validset", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "tst", "devtest", "testdev"), "test"),
    **dict.fromkeys(
        ("eval", "evaluation", "evalset", "heldout", "held_out", "held-out", "holdout", "hold-out"), "eval"
    ),
}
HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(sorted(KEYWORDS, key=len, reverse=True))})(?![^\W\d_])", re.IGNORECASE)


def split_of(name: str) -> str:
    """Return the split that a name contains; "" if none, or more than one."""
    splits = {KEYWORDS[word.lower()] for word in WORD.findall(HUMP.sub("_", name))}
    return splits.pop() if len(splits) == 1 else ""
