"""The local web viewer: slides, what a model made of them, and what was annotated."""
