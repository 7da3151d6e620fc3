"""Machine layer: instruction sets, SIMD values, thread synchronization, separately compiled units."""
