"""Runs a schedule over ranks: stages, messages, sums, the optimizer's step."""
