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
BLANKS = re.compile(r"\s+")
MARK, DIGIT = b" ", b"0"
LOWER = bytes(range(256)).lower()


def normal_form(text: str) -> str:
    """Return a text without differences of case, white space, punctuation and compatible characters (NFKC).

    Symbols such as + and = stay, and so does what stands before a digit: punctuation may be an operator there (3 - 1 is
    not 3 * 1), and a blank separates two numbers. A text of nothing else stays as it is.
    """
    if text.isascii():
        return _of_ascii(text.encode()) or text
    result = _no_letters().sub("", _folded(text))
    return BLANKS.sub(_between_digits, result) if result else text


def words_of(text: str) -> list[str]:
    """Return the words of a text, without differences of case and of compatible characters."""
    if text.isascii():
        return text.encode().translate(_ascii_words()).decode().split()
    return WORD.findall(_folded(text))


def _of_ascii(text: bytes) -> str:
    """Return the normal form of an ASCII text. Bytes, since finding and deleting is several times faster there."""
    marks, kinds = _ascii_marks()
    kind = text.translate(kinds)
    parts, end = [], 0
    while (last := kind.find(MARK + DIGIT, end)) >= 0:
        begin = end + len(kind[end:last].rstrip(MARK))
        between_digits = kind[begin - 1 : begin] == DIGIT
        run = "".join(text[begin : last + 1].decode().split()) or " " * between_digits
        parts += [text[end:begin].translate(LOWER, marks), run.encode()]
        end = last + 1
    parts.append(text[end:].translate(LOWER, marks))
    return b"".join(parts).decode()


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _between_digits(blanks: re.Match[str]) -> str:
    """Return a blank for blanks between two digits, otherwise nothing."""
    before, after = blanks.string[max(0, blanks.start() - 1) : blanks.start()], blanks.string[blanks.end()]
    return " " if before.isdecimal() and after.isdecimal() else ""


@functools.cache
def _ascii_marks() -> tuple[bytes, bytes]:
    """Return the ASCII characters of white space and punctuation, and a translation of all to MARK, DIGIT or none."""
    kinds = (MARK if _is_mark(each) else DIGIT if each.isdigit() else b"a" for each in map(chr, range(128)))
    return bytes(number for number in range(128) if _is_mark(chr(number))), b"".join(kinds) + bytes(128)


@functools.cache
def _ascii_words() -> bytes:
    """Return a translation to lower case that puts a blank for what is no letter or digit."""
    return bytes(number if chr(number).isalnum() else ord(" ") for number in LOWER)


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
