"""The HTTP server: an OpenAI-compatible interface, and the management that the UI uses. Importing it needs no torch."""
