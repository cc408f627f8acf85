"""Activations during a step: saved tensors are kept, offloaded or recomputed."""
