"""What layers cost and how to cut a model by it."""
