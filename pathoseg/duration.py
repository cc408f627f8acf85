"""Durations as users write them: `90s`, `1h30m`."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(given: object) -> object:
    """Seconds of `90s`, `30m`, `1.5h` or `1h30m`; in a text, a bare number counts minutes.

    What is no text is left as it is.

    Raises:
        ValueError: The text is no duration.
    """
    if not isinstance(given, str):
        return given
    text = re.sub(r"\s", "", given.lower())
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("no duration; write for example 30m or 1h30m")
    return sum(float(number) * _UNITS[unit or "m"] for number, unit in parts)
