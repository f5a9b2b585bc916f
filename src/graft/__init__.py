"""Graft a stack of upstream-shaped patches on a pinned PyTorch release."""

__version__ = "0.1.0"
