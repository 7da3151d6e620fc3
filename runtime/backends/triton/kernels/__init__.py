"""The GPU backend's kernels: `_<op>_kernel` and its launcher `<op>` side by side."""
