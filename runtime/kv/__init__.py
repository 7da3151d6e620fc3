"""KV caches: which kinds there are, who holds which page, and what every backend's cache can be asked."""
