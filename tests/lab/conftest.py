"""Instruments may import kernels, which ask for Triton's interpreter when they are imported."""

from tests.runtime.backends.triton import interpreter  # noqa: F401
