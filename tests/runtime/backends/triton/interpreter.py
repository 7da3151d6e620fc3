"""Triton kernels run on a GPU where there is one, and under Triton's interpreter elsewhere.

Import it before any module with kernels: Triton asks for the interpreter when a kernel is decorated.
"""

from __future__ import annotations

import os
import re
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


def run_assembly(
    _builder: Any, assembly: str, _constraints: str, values: list[Any], kinds: list[Any], _pure: bool, _pack: int, /
) -> Any:
    """Run PTX of one register, as cards do: words of 32 bits, and pairs of halves, each result rounded once."""
    registers: dict[str, Any] = {f"${number + 1}": value.data.view(np.uint32) for number, value in enumerate(values)}

    def read(name: str) -> Any:
        return registers[name] if name in registers else np.full(values[0].data.shape, int(name, 0), np.uint32)

    def halves(name: str) -> Any:
        return np.ascontiguousarray(read(name)).view(np.float16).astype(np.float64)

    def table(a: Any, b: Any, c: Any, lookup: Any) -> Any:
        found, number = np.zeros_like(a), int(lookup.flat[0])
        for case in range(8):
            here = [word if case >> place & 1 else ~word for place, word in zip((2, 1, 0), (a, b, c), strict=True)]
            found |= here[0] & here[1] & here[2] if number >> case & 1 else 0
        return found

    whole = {
        "mov.b32": lambda a: a,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "shl.b32": lambda a, b: a << b,
        "lop3.b32": table,
    }
    pairs = {
        "fma.rn.f16x2": lambda a, b, c: a * b + c,
        "mul.rn.f16x2": lambda a, b: a * b,
        "add.rn.f16x2": lambda a, b: a + b,
    }
    for line in re.findall(r"^\s*([a-z]\S+) ([^;.]+);", assembly, re.MULTILINE):
        (to, *names), name = line[1].split(", "), line[0]
        if name in whole:
            registers[to] = whole[name](*map(read, names))
        else:
            registers[to] = pairs[name](*map(halves, names)).astype(np.float16).view(np.uint32)
    from triton.runtime.interpreter import TensorHandle

    return SimpleNamespace(get_result=lambda _: TensorHandle(registers["$0"].view(np.int32), kinds[0].scalar))


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
        patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", run_assembly)
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
