"""What a library's exception says, as one short clause fit for a terminal."""

from __future__ import annotations

_LONGEST = 200


def reason(error: Exception) -> str:
    """The exception's text, or its type where it has none, without the file's own bytes in it.

    Libraries quote malformed headers, which may hold line ends and escape sequences.
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in str(error))
    text = " ".join(printable.split()).rstrip(".")
    if not text or isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
