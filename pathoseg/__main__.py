"""Starts the command line: `pathoseg` and `python -m pathoseg`."""

from __future__ import annotations

from pathoseg.cli import main

if __name__ == "__main__":
    main()
