"""Models as plain graphs of layers."""
