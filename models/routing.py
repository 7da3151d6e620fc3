"""The router of a mixture of experts: which experts a token goes to, and the share that each has in the result.

A softmax over the chosen experts alone is the same as one over all of them whose shares are divided by their sum, so
one flag describes both orders of choosing and softmax.

Source: Shazeer et al. 2017, §2.1 (top-k of a softmax); `normalized` as in Mixtral (Jiang et al. 2024, §2.1).
"""

from __future__ import annotations

import torch

from models.spec import MixtureSpec


def route(logits: torch.Tensor, mixture: MixtureSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts.

    Args:
        logits: float32 [M, E], the router's.
        mixture: The mixture.

    Returns:
        The chosen experts int64 [M, chosen] in ascending order, and their shares float32 [M, chosen].
    """
    chosen = logits.topk(mixture.chosen, dim=-1).indices.sort(dim=-1).values
    if mixture.normalized:
        return chosen, logits.gather(-1, chosen).softmax(-1)
    return chosen, logits.softmax(-1).gather(-1, chosen)
