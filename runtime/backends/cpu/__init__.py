"""The CPU backend: integer kernels compiled by numba, run as one program per step by a small pool of threads.

`isa` chooses the instruction-set variant, `emit` and `vector` give kernels SIMD values, `sync` the barrier, `layout`
the tiled weights, `plan` records a model's forward pass into a program, `link` finds the compiled `units` of its
instructions (`inputs`, `products`, `selection`, `attention`), `executor` runs it, `pool` brings the threads, and
`decoder` is what the engine sees. Kernels stand in `kernels`.
"""
