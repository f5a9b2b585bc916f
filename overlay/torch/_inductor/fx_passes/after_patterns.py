"""Passes over a graph that the pattern matcher is done with, in the order in which they run."""

from .online_softmaxes import simplify_online_softmaxes
from .shared_padding import share_padding


passes_after_patterns = (share_padding, simplify_online_softmaxes)
