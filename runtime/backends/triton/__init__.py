"""The GPU backend: Triton kernels (`runtime.kernels.<op>.triton`), the decode step captured in one CUDA graph.

Under Triton's interpreter the same code runs on CPU tensors, slowly and without graphs: that is how it is tested on a
machine without a GPU.
"""
