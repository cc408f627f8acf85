"""The identity of a model bundle: a hash of its card, read without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pathoseg.errors import PathosegError, not_permitted

WEIGHTS = "weights.safetensors"
CARD = "model.json"
COPY_AGAIN = "Copy the whole folder again from where it was trained, or train again."


def bundle_id(folder: Path) -> str:
    """Return the identity of a bundle: a hash of its card, which holds the hash of its weights.

    Raises:
        PathosegError: The card is missing.
    """
    return hashlib.sha256(read_bundle_file(folder / CARD)).hexdigest()[:16]


def read_bundle_file(path: Path) -> bytes:
    """Read a file of a bundle whole.

    Raises:
        PathosegError: It is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PathosegError(
            f"{path} is missing, so {path.parent} is no whole model bundle.",
            f"Give a folder with {CARD} and {WEIGHTS}, as a finished run has in `model/`.",
        ) from None
    except PermissionError:
        raise not_permitted(path) from None
    except OSError as error:
        raise PathosegError(f"{path} cannot be read ({error.strerror}).", COPY_AGAIN) from error
