"""Spatial parallelism: one tile's rows on several ranks, with exact halos and gradients."""
