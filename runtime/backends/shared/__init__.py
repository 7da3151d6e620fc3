"""Blocks of a model shared by two backends: the first ones on a card with their cache, the others on the processor."""
