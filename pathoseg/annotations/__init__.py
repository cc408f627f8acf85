"""Outlines and masks that pathologists drew, from every tool they use."""
