"""Products of activations with a packed low-bit matrix."""
