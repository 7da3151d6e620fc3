"""A half-precision cache as the GPU's pages have it."""

from __future__ import annotations

import torch

from runtime.backends.triton.kernels.cache.pages import LayerPages
from runtime.kv.kinds import KINDS


class HalfPages:
    """A half-precision cache [2, slots, H_kv, T, D] of one layer cut into pages that lie in any order."""

    def __init__(self, cache: torch.Tensor, device: str) -> None:
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
