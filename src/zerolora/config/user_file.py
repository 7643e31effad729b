"""Reads a text file of the user's own that the config names."""

from pathlib import Path

from zerolora.errors import UserError
from zerolora.json_file import read_bytes


def user_text(name: str, what: str, longest: int) -> str:
    """Return the text of file `name` as it is, with its own line ends; `what` says what belongs there.

    Raises UserError, naming the file, if it cannot be read, is no UTF-8, or has more than `longest` characters.
    """
    try:
        text = read_bytes(Path(name), 4 * longest).decode()  # not read_text, which turns other line ends into \n
    except FileNotFoundError:
        raise UserError(f"{name}: there is no such file; correct the path, or put {what} there") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}; put a file there that can be read") from None
    if len(text) > longest:
        raise UserError(f"{name}: has {len(text):,} characters; write at most {longest:,}")
    return text
