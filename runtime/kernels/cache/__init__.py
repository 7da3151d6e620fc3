"""What the KV cache stores of a key or a value."""
