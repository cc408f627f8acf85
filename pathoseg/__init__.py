"""pathoseg: whole-slide-image segmentation for models and tiles too big for one GPU."""

__version__ = "0.1.0"
