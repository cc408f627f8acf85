"""Plans: how a model is cut into stages, and in which order they run."""
