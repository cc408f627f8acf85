"""From a model and a slide to the files of its result."""
