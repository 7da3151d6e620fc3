"""Attention over the paged cache on the GPU."""
