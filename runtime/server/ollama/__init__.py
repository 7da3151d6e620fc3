"""Ollama's interface, translated into requests and answers of the service."""
