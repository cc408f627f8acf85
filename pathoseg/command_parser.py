"""The parser of the commands, which says in our words what it refuses."""

from __future__ import annotations

import difflib
import re
from typing import Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from pathoseg.errors import PathosegError

# Of all that a parser refuses; where typer has it depends on its version.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


class Command(TyperCommand):
    """A command that says in our words what is wrong with its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            _, bare, given = self.make_parser(ctx).parse_args(list(args))
            self._refuse_twice(given)
            self._refuse_bare(bare)
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise self._refusal(error, ctx) from None

    def _refuse_twice(self, given: list[Any]) -> None:
        """Refuse an option given twice of which the last one alone would count."""
        for option in self.params:
            once = isinstance(option, TyperOption) and not option.multiple and not option.is_flag
            if once and given.count(option) > 1:
                raise PathosegError(
                    f"{option.opts[0]} is given {given.count(option)} times, and takes one value.",
                    "Leave out the others.",
                )

    def _refuse_bare(self, bare: list[str]) -> None:
        """Refuse an argument of a command that has options alone: a folder without its option."""
        if not bare or not all(isinstance(each, TyperOption) for each in self.params):
            return
        option = next((name for name in ("--slides", "--out") if name in self._names()), "--help")
        raise PathosegError(
            f"{bare[0]} stands alone, and pathoseg {self.name} takes options.",
            f"Did you mean: pathoseg {self.name} {option} {bare[0]} (a name with blanks in quotes)",
        )

    def _refusal(self, error: Exception, ctx: Any) -> PathosegError:
        """Return what is told of a wrong option, a wrong value, or a missing argument."""
        option: str | None = getattr(error, "option_name", None)
        parameter: Any = getattr(error, "param", None)
        how = f"pathoseg {self.name} --help lists its options."
        if parameter is not None:
            name = parameter.opts[0] if isinstance(parameter, TyperOption) else parameter.metavar
            what = _asked(str(getattr(error, "message", "")))
            return PathosegError(f"{name} {what}", _plain(getattr(parameter, "help", "")) or how)
        if option is None:
            return PathosegError(f"{getattr(error, 'message', error)}", how)
        if option in self._names():
            return PathosegError(f"{option} needs a value.", how)
        if near := difflib.get_close_matches(option, self._names(), n=1, cutoff=0.75):
            how = f"Did you mean {near[0]}?"
        elif others := [other for other in _others(ctx) if option in _options(other)]:
            how = f"It is an option of pathoseg {', '.join(str(each.name) for each in others)}."
        elif tables := _tables_with(option.lstrip("-").replace("-", "_")):
            how = f"Set it in {' or '.join(tables)} of a file that --config names."
        return PathosegError(f"pathoseg {self.name} has no option {option}.", how)

    def _names(self) -> list[str]:
        return _options(self)


def _plain(text: str | None) -> str:
    """Return a help text without the backslashes that keep its brackets from being markup."""
    return (text or "").replace("\\[", "[")


def _options(command: Any) -> list[str]:
    """Return the long names of a command's options."""
    return [name for each in command.params for name in each.opts if name.startswith("--")]


def _others(ctx: Any) -> list[Any]:
    """Return the commands beside that of a context."""
    return [] if ctx.parent is None else list(ctx.parent.command.commands.values())


def _asked(told: str) -> str:
    """Return what a parameter takes, of the parser's message, which is empty for a missing one."""
    if not told:
        return "is missing."
    if found := re.search(r"(greater|less) than or equal to (\S+)", told):
        return f"must be {found[2]} or {'more' if found[1] == 'greater' else 'less'}."
    if found := re.search(r"'(.+)' does not exist", told):
        return f"names {found[1]}, which does not exist."
    for kind, words in (("integer", "a whole number"), ("number", "a number")):
        if f"valid {kind}" in told:
            return f"takes {words}."
    return f"does not fit: {told}"


def _tables_with(key: str) -> list[str]:
    """Return the tables of the configuration that have a key, as `[train]`."""
    from pathoseg.config import Config

    hints = get_type_hints(Config)
    return [f"[{name}]" for name, table in hints.items() if hasattr(table, key)]
