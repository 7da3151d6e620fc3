"""What programs run on: instruction sets, SIMD values, threads that keep step, separately compiled units."""
