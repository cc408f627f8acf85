"""The version of the package, as pip, bundles and summaries state it."""

__version__ = "0.1.0"
