"""The GPU backend's kernels: `_<op>_kernel` and its launcher `<op>`, and what is compiled ahead of time (`ahead`)."""
