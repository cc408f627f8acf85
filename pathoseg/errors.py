"""The one error a user meets: what is wrong with which file, and a hint that mends it."""

from collections.abc import Collection
from pathlib import Path

_MOST_NAMED = 4
# What torch says in a RuntimeError: it has a class of its own for accelerators alone.
_NO_MEMORY = ("out of memory", "can't allocate memory", "std::bad_alloc")


class PathosegError(Exception):
    """Bad input or a machine's limit, told in two sentences instead of a traceback.

    Args:
        problem: What is wrong, naming the file, key or value.
        hint: What the user can do about it.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem} {hint}")
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[type["PathosegError"], tuple[object, ...]]:
        # Exception pickles its args (the joined text), which does not fit __init__.
        return type(self), (self.problem, self.hint)


class MemoryExhaustedError(PathosegError):
    """An accelerator ran out of memory in training, which can go on by a plan with less.

    Args:
        problem: As for PathosegError.
        hint: Likewise.
        fits: Bytes that another plan may fill on each rank.

    Attributes:
        run: The folder of the run, once it is known.
    """

    def __init__(self, problem: str, hint: str, fits: int) -> None:
        super().__init__(problem, hint)
        self.fits = fits
        self.run: Path | None = None

    def __reduce__(self) -> tuple[type["PathosegError"], tuple[object, ...]]:
        return type(self), (self.problem, self.hint, self.fits)


class LostRankError(PathosegError):
    """A rank of the job was killed or has crashed, or gives no sign of life.

    Args:
        problem: As for PathosegError.
        hint: Likewise.
        rank: Its number.
    """

    def __init__(self, problem: str, hint: str, rank: int) -> None:
        super().__init__(problem, hint)
        self.rank = rank

    def __reduce__(self) -> tuple[type["PathosegError"], tuple[object, ...]]:
        return type(self), (self.problem, self.hint, self.rank)


class UnreadableError(PathosegError):
    """Pixels that a slide holds but cannot deliver: *unread*, never white."""


class StoppedError(Exception):
    """The user (SIGINT) or the machine (SIGTERM) ended the work; all that was done is saved.

    Args:
        number: The signal.
        advice: How to go on.
    """

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(advice)
        self.exit_code = 128 + number
        self.advice = advice


def not_permitted(path: Path) -> PathosegError:
    """Return the error of a file that this user may not read."""
    return PathosegError(f"{path} cannot be read: permission denied.", "Check its permissions.")


def first_names(names: Collection[str]) -> str:
    """Return names as messages tell them: the first few, and how many more there are."""
    shown, more = [*names][:_MOST_NAMED], len(names) - _MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that the memory of the host or the device is used up."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return told or isinstance(error, MemoryError)
