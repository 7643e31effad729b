"""The normal form of texts, in which texts are equal that differ in case, white space or punctuation only.

GPT-3 ignores these too when it looks for test data in training data (Brown et al. 2020, arXiv 2005.14165, appendix C).
"""

import functools
import re
import unicodedata

# Scripts without blanks between words: Thai, Lao, Burmese, Khmer, kana and Han. Each letter counts as a word.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
NO_WORD = {number: " " for number in range(128) if not chr(number).isalnum()}
DIGIT = re.compile(r"[0-9]")
BLANKS = re.compile(r"\s+")


def normal_form(text: str) -> str:
    """Return a text without differences of case, white space, punctuation and compatible characters (NFKC).

    Symbols such as + and = stay, and so does what stands before a digit: punctuation may be an operator there (3 - 1 is
    not 3 * 1), and a blank separates two numbers. A text of nothing else stays as it is.
    """
    if text.isascii() and not DIGIT.search(text):  # the same, faster
        return text.lower().translate(_ascii_marks()) or text
    result = _no_letters().sub("", _folded(text))
    return BLANKS.sub(_between_digits, result) if result else text


def words_of(text: str) -> list[str]:
    """Return the words of a text, without differences of case and of compatible characters."""
    folded = _folded(text)
    return folded.translate(NO_WORD).split() if text.isascii() else WORD.findall(folded)


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _between_digits(blanks: re.Match[str]) -> str:
    """Return a blank for blanks between two digits, otherwise nothing."""
    before, after = blanks.string[max(0, blanks.start() - 1) : blanks.start()], blanks.string[blanks.end()]
    return " " if before.isdecimal() and after.isdecimal() else ""


@functools.cache
def _ascii_marks() -> dict[int, None]:
    """Return a translation that removes the ASCII characters of white space and punctuation."""
    return {number: None for number in range(128) if _is_mark(chr(number))}


@functools.cache
def _no_letters() -> re.Pattern[str]:
    """Return a pattern of white space and punctuation that is not before a digit."""
    # Of plane 0 alone, which re looks up in a table; punctuation of the others is of historic scripts.
    marks = "".join(re.escape(character) for character in map(chr, range(1 << 16)) if _is_mark(character))
    return re.compile(rf"[{marks}]++(?!\d)")


def _is_mark(character: str) -> bool:
    """Return whether a character is white space, punctuation, or invisible: a control or format character."""
    return character.isspace() or unicodedata.category(character) in (
        "Pc",
        "Pd",
        "Ps",
        "Pe",
        "Pi",
        "Pf",
        "Po",
        "Cc",
        "Cf",
    )
