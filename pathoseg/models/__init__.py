"""Networks, losses, metrics and the bundle a trained model travels in."""
