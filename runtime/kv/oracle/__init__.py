"""The KV caches in plain torch: what a page of each kind holds, bit for bit, and attention over it."""
