"""Patched trees: a Python with a stock torch, and an environment made from it and the stack."""
