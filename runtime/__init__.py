"""The runtime: runs models. Kernels, caches, the packed decoder, the engine and the HTTP server.

Shape key, used in every comment and docstring of this package:

    B batch (sequences)      S query length            T cached length
    M rows of one step       R rows that need logits   V vocabulary
    H query heads            H_kv key-value heads      D head_dim
    C hidden size            N output channels         K input channels
    G groups of a row of K input channels
"""


def program_version() -> str:
    """Version of the installed program; runtime and UI only work together if theirs are equal."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lowbit-chat")
    except PackageNotFoundError:
        return "0+source"
