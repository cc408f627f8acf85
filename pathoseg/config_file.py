"""Options as TOML: read with the flags that overrule them, written back as the run's record."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from pathoseg.config import FORMAT, Config
from pathoseg.errors import PathosegError
from pathoseg.progress import say

UNNUMBERED = 1  # format of the config.toml of a run that states none

# Format → the defaults that changed after it, as they were: table ("" is the top level) → key →
# value as in TOML. A default that changes, or a new key that changes what a run does, adds a row
# to the newest format that ran without it.
_FORMER_DEFAULTS: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {
        "annotations": {"roi": [], "unclassified": "skip", "labels": "centre"},
        "tiles": {"tile": 1024, "offsets": "grid", "balance_limit": math.inf},
        "loss": {"context": 0.0},
        "parallel": {"shards": 1},
    }
}

# Keys that are gone: "table.key" → what became of it, a clause. Files that have them are accepted.
_RETIRED: Mapping[str, str] = {}


def load_config(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    unnumbered: int = FORMAT,
) -> Config:
    """Read the configuration of `path` (TOML), overruled by `flags`.

    A key that is left out has the default of the file's format; a retired one is said and dropped.

    Args:
        path: TOML file, or None for the defaults.
        flags: Section → key → value; None values are flags not given. Top-level keys stand
            under the section "".
        unnumbered: Format of a file that states none: today's for what a user writes, `UNNUMBERED`
            for the record of a run.

    Raises:
        PathosegError: The file cannot be read, is of a newer format, a key is unknown, or a value
            does not fit.
    """
    table = _merged(path, flags, unnumbered)
    where = str(path) if path else "The options"
    try:
        return _adapter().validate_python(table)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        *within, key = (str(part) for part in first["loc"])
        why = _asked(first, within, key)
        if (flags or {}).get(".".join(within), {}).get(key) is not None:
            raise PathosegError(
                f"--{key.replace('_', '-')} {first['input']} does not fit ({why}).",
                "Add --help to the command, or see docs/configuration.md, for the values it takes.",
            ) from None
        raise PathosegError(
            f"{where}: {'.'.join((*within, key))} = {first['input']!r} does not fit ({why}).",
            "See docs/configuration.md for the values it takes.",
        ) from None


@cache  # made in 40 ms
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _asked(wrong: Mapping[str, Any], within: Sequence[str], key: str) -> str:
    """Return what a key takes, of an error of pydantic, and its default."""
    bounds = wrong.get("ctx", {})
    said = {
        "greater_than_equal": "must be {ge} or more",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be {le} or less",
        "less_than": "must be less than {lt}",
        "literal_error": "must be {expected}",
        **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
        **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
        "finite_number": "must be a finite number",
        **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
        **dict.fromkeys(("tuple_type", "list_type"), "must be a list: [ … ]"),
        "dict_type": "must be a table: {{ … }}",
        "string_type": 'must be a text: " … "',
    }.get(wrong["type"])
    why = said.format(**bounds) if said else str(wrong["msg"]).removeprefix("Value error, ")
    table: Any = Config()
    for name in within:
        table = getattr(table, name, None)
    default = getattr(table, key, None)
    return f"{why}; the default is {default}" if default is not None else why


def given_options(
    path: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what the file and the flags state, without defaults, in the form of `flags`.

    Args:
        path: As for `load_config`.
        flags: As for `load_config`.

    Raises:
        PathosegError: The file cannot be read, or a key is unknown.
    """
    table = _merged(path, flags, unnumbered=None)
    table.pop("format", None)  # says what the keys left out are, not what is asked for
    sections = {key: value for key, value in table.items() if isinstance(value, dict)}
    return {"": {key: table[key] for key in table.keys() - sections.keys()}, **sections}


def write_config(config: Config, path: Path) -> None:
    """Write `config` as TOML that `load_config` reads back equal; what is None is left out."""
    path.write_text(tomli_w.dumps(_without_none(asdict(config))), encoding="utf-8")


def changed_options(config: Config) -> list[tuple[str, Any, Any]]:
    """Return the options that are not at their defaults: name as `table.key`, value, default."""
    return list(_changes(asdict(config), asdict(Config()), ""))


def _changes(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            yield from _changes(value, default, f"{prefix}{key}.")
        elif value != default:
            yield f"{prefix}{key}", value, default


def _merged(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None,
    unnumbered: int | None,
) -> dict[str, Any]:
    """Return the table of the file, with the flags that are given written over it.

    Args:
        path: As for `load_config`.
        flags: As for `load_config`.
        unnumbered: As for `load_config`; None adds no default of an earlier format.
    """
    table = _read(path) if path else {}
    where = str(path) if path else "The options"
    _drop_retired(table, where)
    if unnumbered is not None:
        _fill_former_defaults(table, where, unnumbered)
    _refuse_unknown(Config, table, where, "")
    # Those of no section come last: from Python, one may be what is no table.
    for section, values in sorted((flags or {}).items(), key=lambda each: not each[0]):
        target = table.setdefault(section, {}) if section else table
        target.update({key: value for key, value in values.items() if value is not None})
    _refuse_unknown(Config, table, "The options", "")  # those of the file are known by now
    return table


def _read(path: Path) -> dict[str, Any]:
    if path.is_fifo():  # empty when it is read again, as by ranks
        raise PathosegError(
            f"{path} is a pipe, and options are read more than once.", "Write them to a file."
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with a mark, as by Notepad
    except OSError as error:
        raise PathosegError(
            f"{path} cannot be read ({error.strerror}).", "Check the path given to --config."
        ) from None
    except UnicodeDecodeError:
        raise PathosegError(f"{path} is not in UTF-8, as TOML is.", "Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise PathosegError(f"{path} is not valid TOML: {error}.", "Mend that line.") from None


def _drop_retired(table: dict[str, Any], where: str) -> None:
    for name, fate in _RETIRED.items():
        section, _, key = name.rpartition(".")
        values = table.get(section) if section else table
        if isinstance(values, dict) and key in values:
            del values[key]
            _say_once(f"{where}: `{name}` is ignored: {fate}.")


@cache
def _say_once(text: str) -> None:
    say(text)


def _fill_former_defaults(table: dict[str, Any], where: str, unnumbered: int) -> None:
    """Give keys left out the defaults of the table's format, where today's are others."""
    number = table.setdefault("format", unnumbered)
    if type(number) is not int:
        return  # refused with the other values that do not fit
    if number > FORMAT:
        raise PathosegError(
            f"{where} is of format {number}, and this pathoseg knows formats up to {FORMAT}.",
            "Use the version of pathoseg that wrote it, or a newer one.",
        )
    for former in sorted(_FORMER_DEFAULTS):  # of several former defaults the oldest one holds
        if former < number:
            continue
        for section, values in _FORMER_DEFAULTS[former].items():
            target = table.setdefault(section, {}) if section else table
            if isinstance(target, dict):
                for key, value in values.items():
                    target.setdefault(key, value)


def _refuse_unknown(cls: type, table: Mapping[str, Any], where: str, prefix: str) -> None:
    known = get_type_hints(cls)
    names = [entry.name for entry in fields(cls)]
    for key, value in table.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"Did you mean `{near[0]}`?" if near else f"Known here: {', '.join(names)}."
            is_misspelt = near and isinstance(value, Mapping)
            homes = [] if is_misspelt else list(_homes(key))
            if homes:  # known elsewhere: misplaced
                hint = f"It belongs {' or '.join(homes)}."
            raise PathosegError(f"{where}: unknown key `{prefix}{key}`.", hint)
        if is_dataclass(known[key]) and isinstance(known[key], type):
            if not isinstance(value, dict):
                raise PathosegError(
                    f"{where}: `{prefix}{key}` is a table, not a value.",
                    f"Write it as [{prefix}{key}] with keys below.",
                )
            _refuse_unknown(known[key], value, where, f"{prefix}{key}.")


def _homes(key: str) -> Iterator[str]:
    """Yield the places of the file that know a key, in words."""
    for name, kind in get_type_hints(Config).items():
        is_table = isinstance(kind, type) and is_dataclass(kind)
        if is_table and key in (entry.name for entry in fields(kind)):
            yield f"to [{name}]"
        if name == key:
            yield f"to the top level, as [{name}]" if is_table else "above the first table"


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
