"""The flows that join the wings: train, infer, evaluate, cache."""
