"""Writes docs/configuration.md from the docstrings of the configuration's own classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from pathoseg.config import Config

PAGE = Path(__file__).with_name("configuration.md")

_HEAD = """# The configuration file

`--config FILE.toml` takes everything that the flags take, and the rest. Flags overrule the file;
what a run used in the end is written to `RUN/config.toml`, which `--config` takes again. An
unknown key is refused with the nearest known one, a misplaced one with the table that it belongs
to. A key that is left out, or whose default is "–", is decided by what its description says.

A run keeps the defaults that it began with. Its `config.toml` states their number, `format`:
`--resume` and `evaluate` give keys that are left out the defaults of that number, or of format 1
where there is none. In a file of your own no number means today's defaults. A format that this
version does not know yet is refused; a key that it no longer has is named and ignored.

    [data]
    classes = ["gland", "tumour"]

    [tiles]
    mpp = 1.0
    tile = 512

    [train]
    epochs = 30
    batch = 8
    microbatch = 2

This page is written by `python docs/make_configuration.py` from the source.
"""


def page() -> str:
    """The whole page as Markdown."""
    hints = get_type_hints(Config)
    described = _attributes(inspect.getdoc(Config) or "")
    top = [
        (entry.name, _default(entry), described[entry.name])
        for entry in dataclasses.fields(Config)
        if not dataclasses.is_dataclass(hints[entry.name])
    ]
    parts = [_HEAD, "## Top level\n", _table(top)]
    for entry in dataclasses.fields(Config):
        section = hints[entry.name]
        if not dataclasses.is_dataclass(section):
            continue
        summary = inspect.getdoc(section) or ""
        parts.append(f"## [{entry.name}]\n\n{summary.splitlines()[0]}\n")
        described = _attributes(summary)
        kinds = get_type_hints(section)
        rows = [
            (key.name, _default(key), described[key.name] + _choices(kinds[key.name]))
            for key in dataclasses.fields(section)
        ]
        parts.append(_table(rows))
    return "\n".join(parts)


def _attributes(text: str) -> dict[str, str]:
    """Attribute to description, from a docstring's section of attributes."""
    body = text.split("Attributes:\n", 1)[1].split("\n\n", 1)[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", body, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words) for name, words in entries}


def _choices(kind: object) -> str:
    """The values of a key that takes one of a few."""
    if get_origin(kind) is not Literal:
        return ""
    return " One of " + ", ".join(f'"{choice}"' for choice in get_args(kind)) + "."


def _default(key: dataclasses.Field[object]) -> str:
    value = key.default
    if value is None:
        return "–"
    if value is dataclasses.MISSING:
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value).replace("'", '"')


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {words} |" for name, default, words in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
