"""The router of a mixture of experts: which experts a token goes to, and the share that each has in the result.

A softmax over the chosen experts alone is the same as one over all of them whose shares are divided by their sum, so
one flag describes both orders of choosing and softmax.

Shared experts, to which every row goes, all have the sigmoid of the router's last logit as their share, or 1. One that
is wider than the others counts as several: a gated MLP is the sum of the parts that its channels are divided into.

Sources: Shazeer et al. 2017, §2.1 (top-k of a softmax); `normalized` as in Mixtral (Jiang et al. 2024, §2.1); shared
experts, DeepSeekMoE (Dai et al. 2024, §3.2), with the gate of Qwen1.5-MoE; sigmoids and the correction of the choice,
DeepSeek-V3 (2024, §2.1.2).
"""

from __future__ import annotations

import torch

from models.spec import MixtureSpec


def route(
    logits: torch.Tensor, mixture: MixtureSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts.

    Args:
        logits: float32 [M, scores], the router's.
        mixture: The mixture.
        correction: float32 [experts], added to the scores for the choice; None: there is none.

    Returns:
        The experts that each row goes to, int64 [M, read] in ascending order, shared ones last; and their shares,
        float32 [M, read].
    """
    logits, of_shared = logits[:, : mixture.experts], logits[:, mixture.experts :]
    scores = logits.sigmoid() if mixture.scoring == "sigmoid" else logits.softmax(-1)
    # Both grow with the logits, in which fewer are equal.
    ranks = logits if correction is None else scores + correction
    chosen = ranks.topk(mixture.chosen, dim=-1).indices.sort(dim=-1).values
    shares = scores.gather(-1, chosen)
    if mixture.normalized and mixture.scoring == "sigmoid":
        shares = shares / shares.sum(-1, keepdim=True)
    elif mixture.normalized:
        shares = logits.gather(-1, chosen).softmax(-1)
    shares = shares * mixture.scale
    if not mixture.shared:
        return chosen, shares
    shared = torch.arange(mixture.experts, mixture.num_experts).expand(len(logits), -1)
    of_each = of_shared.sigmoid() if mixture.gated else torch.ones(len(logits), 1)
    return torch.cat((chosen, shared), dim=-1), torch.cat((shares, of_each.expand(-1, mixture.shared)), -1)
