"""The CPU backend: integer kernels compiled by numba, run as one program per step by a small pool of threads.

`machine` chooses the instruction set and gives kernels SIMD values and thread synchronization, `tiles` repacks weights,
`plan` records a model's forward pass as a program, `link` finds the compiled `units` of its instructions, `executor`
runs it, `pool` manages the threads, and `decoder` is the engine's view of it all. The kernels are in `kernels`.
"""
