"""Splitting any PyTorch model over ranks; knows no pathology."""
