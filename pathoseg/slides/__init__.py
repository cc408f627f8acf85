"""Whole-slide images: readers of one shape for many formats."""
