"""The tuner: device detection, measured bandwidths, and the search for `k_chunk` within a slowdown budget.

The search times through the `Timer` protocol defined here; this package imports neither `runtime` nor `models`.
"""
