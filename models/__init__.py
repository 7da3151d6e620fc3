"""Models: families, the full-precision decoder, quantizers, canonical packing and the checkpoint store.

Nothing here knows kernels or devices; `runtime` runs what this package describes.
"""
