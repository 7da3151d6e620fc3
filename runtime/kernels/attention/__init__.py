"""Causal attention of grouped query heads over the cache."""
