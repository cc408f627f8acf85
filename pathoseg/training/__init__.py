"""The machinery of training: from slides and a network to a trained model."""
