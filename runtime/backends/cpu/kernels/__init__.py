"""The CPU backend's kernels, one module an operation; a kernel that grew is a folder."""
