"""KV caches: their kinds, page tables, and the interface and bookkeeping shared by all backends."""
