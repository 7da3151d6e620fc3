"""Triton kernels run on a GPU where there is one, and under Triton's interpreter elsewhere.

Import it before any module with kernels: Triton asks for the interpreter when a kernel is decorated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
"""Where kernels run."""
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def patched_once() -> Iterator[None]:
    """Has the interpreter replace Triton's language once a launch and module of the language, and round as cards do.

    By itself it does the first for every call of a function within a kernel; without, tests take a third less. And it
    cuts the last bits off where cards round to bfloat16.
    """
    if HAS_CUDA:
        yield
        return
    from triton.runtime import interpreter

    patch_language, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    convert = interpreter._convert_float
    language = (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    def patch_once(fn: Any) -> Any:
        seen = tuple(any(value is module for value in fn.__globals__.values()) for module in language)
        if seen in patched:
            return None
        patched.add(seen)
        return patch_language(fn)

    def run_patched(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return run(self, *arguments, **options)

    def convert_rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_rounded)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_patched)
        yield
