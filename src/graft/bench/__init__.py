"""Measure compiled code side by side: stock, patched, eager and peers, each checked first."""
