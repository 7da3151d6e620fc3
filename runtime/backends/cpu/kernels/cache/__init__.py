"""Writing the KV cache on the CPU: single tokens, whole pages, GEAR's corrections."""
