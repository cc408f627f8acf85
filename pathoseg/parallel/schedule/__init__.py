"""Orders of work on every rank, as data."""
