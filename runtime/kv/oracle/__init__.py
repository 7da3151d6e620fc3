"""Oracles of the KV caches in plain torch: page contents of each kind, bit for bit, and attention over them."""
