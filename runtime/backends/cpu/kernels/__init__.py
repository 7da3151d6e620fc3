"""Kernels of the CPU backend, one module or folder per operation."""
