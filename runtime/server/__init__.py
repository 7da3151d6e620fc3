"""HTTP server: an OpenAI-compatible interface, and the management interface of the UI. Does not import torch."""

MAX_MODELS = 3
"""Models that are loaded at the same time, where nothing else is said."""
