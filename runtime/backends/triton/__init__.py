"""The GPU backend: Triton kernels (`runtime.backends.triton.kernels`), one captured CUDA graph for each decode step.

Under Triton's interpreter the same code runs on CPU tensors, slowly and without graphs: that is how it is tested on a
machine without a GPU.
"""
