"""Writing the paged cache on the GPU."""
