"""GPU backend: Triton kernels (`runtime.backends.triton.kernels`), with one captured CUDA graph per decode step.

Under Triton's interpreter the same code runs on CPU tensors, slowly and without graphs, for tests on machines without a
GPU.
"""
