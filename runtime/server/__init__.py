"""HTTP server: an OpenAI-compatible interface, and the management interface of the UI. Does not import torch."""
