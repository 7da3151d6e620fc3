"""Low-bit matrix times many rows of activations (prefill, verification, batches)."""
