"""Kernels of the GPU backend: `_<op>_kernel` and its launcher `<op>` side by side."""
