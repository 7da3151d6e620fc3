"""Triton kernels run on a GPU where there is one, and under Triton's interpreter elsewhere.

Import it before any module with kernels: Triton asks for the interpreter when a kernel is decorated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
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
    """Has the interpreter find things out about Triton's language once, and round as cards do.

    By itself it looks through the whole language for what it replaces, at every launch and every call of a function
    within a kernel, makes the types of blocks anew for every number, and works out whether whole numbers overflow, of
    which it tells nobody. And it cuts the last bits off where cards round to bfloat16.
    """
    if HAS_CUDA:
        yield
        return
    from triton.runtime import interpreter

    convert, options = interpreter._convert_float, interpreter.interpreter_builder.options
    assert not options.debug, "or it would tell of an overflow"

    def convert_rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_rounded)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        _replace_language_once(patch, interpreter)
        _keep_types(patch, interpreter)
        yield


def _replace_language_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Replace Triton's language at the begin of a launch, by what was found at the first."""
    replace_all, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    changes: list[tuple[Any, str, Any]] = []
    replaced = False

    def replace_once(_fn: Any) -> Any:
        nonlocal replaced
        if replaced:
            return None
        replaced = True
        if not changes:
            scope = replace_all(language)
            changes.extend((owner, name, getattr(owner, name)) for owner, name, _ in scope._changes)
            return scope
        scope = interpreter._LangPatchScope()
        for change in changes:
            scope.set_attr(*change)
        return scope

    def run_replaced(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal replaced
        replaced = False
        return run(self, *arguments, **options)

    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(interpreter.GridExecutor, "__call__", run_replaced)


def _keep_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Keep what follows from a type: numpy's type, and of a block its shape, name, and number of elements."""
    block, tensor, numpy_type = interpreter.tl.block_type, interpreter.tl.tensor, interpreter._get_np_dtype
    make_block, make_tensor = block.__init__, tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    shapes: dict[str | None, tuple[Any, Any]] = {}

    def kept_numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        key = kind.name if kind.is_block() else None
        if key not in shapes:
            make_tensor(self, handle, kind)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[key]

    patch.setattr(interpreter, "_get_np_dtype", kept_numpy_type)
    patch.setattr(block, "__init__", init_block)
    patch.setattr(tensor, "__init__", init_tensor)
