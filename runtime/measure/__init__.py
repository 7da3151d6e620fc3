"""Measurements of a loaded decoder: perplexity, speed, and the slowdown that compensation costs."""
