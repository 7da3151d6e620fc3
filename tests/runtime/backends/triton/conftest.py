"""Triton kernels are tested on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel module is imported


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once():
    """The interpreter replaces all of Triton's language anew for every call of a function within a kernel.

    Once for every launch and module of the language is enough, and takes a third off these tests.
    """
    if HAS_CUDA:
        yield
        return
    from triton.runtime import interpreter

    patch_language, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    def patch_once(fn):
        seen = tuple(any(value is module for value in fn.__globals__.values()) for module in language)
        if seen in patched:
            return None
        patched.add(seen)
        return patch_language(fn)

    def run_patched(self, *arguments, **options):
        patched.clear()
        return run(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_patched)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: `cuda`, or `cpu` under the interpreter."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(scope="session")
def cuda() -> str:
    """The GPU, for tests that make sense only there."""
    if not HAS_CUDA:
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread of torch: references are small, and its threads collapse where cores are contended."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class HalfPages:
    """A half-precision cache [2, slots, H_kv, T, D] of one layer cut into pages that lie in any order."""

    def __init__(self, cache: torch.Tensor, device: str) -> None:
        from runtime.backends.triton.kernels.cache.pages import LayerPages
        from runtime.kv.kinds import KINDS

        _, slots, H_kv, T, D = cache.shape
        page = KINDS["fp16"].page
        each = -(-T // page)
        padded = torch.full((2, slots, H_kv, each * page, D), torch.nan, dtype=torch.float16)
        padded[..., :T, :] = cache
        self.shape, self.order = cache.shape, torch.randperm(slots * each, generator=torch.Generator().manual_seed(1))
        cut = padded.view(2, slots, H_kv, each, page, D).transpose(2, 3).reshape(2, slots * each, H_kv, page * D)
        pools = torch.empty(cut.shape, dtype=torch.float16)
        pools[:, self.order] = cut
        keys, values = pools.to(device).view(torch.uint8)
        nothing = torch.zeros(slots, H_kv, 0, D, dtype=torch.float16, device=device)
        self.pages = LayerPages(
            kind=KINDS["fp16"],
            head_dim=D,
            kv_heads=H_kv,
            layers=1,
            pools={"keys": keys, "values": values},
            windows={"keys": nothing, "values": nothing},
            tables=self.order.to(torch.int32).view(slots, each).to(device),
            paged=torch.zeros(slots, dtype=torch.int32, device=device),
        )

    def read(self) -> torch.Tensor:
        """The cache as it is now, on the CPU: float16 [2, slots, H_kv, T, D]."""
        _, slots, H_kv, T, D = self.shape
        pools = torch.stack([self.pages.pools[part].cpu().view(torch.float16) for part in ("keys", "values")])
        cut = pools[:, self.order].view(2, slots, -1, H_kv, self.pages.kind.page, D).transpose(2, 3)
        return cut.reshape(2, slots, H_kv, -1, D)[..., :T, :]


@pytest.fixture(scope="session")
def half_pages() -> Callable[[torch.Tensor, str], HalfPages]:
    """Makes pages of a half-precision cache."""
    return HalfPages
