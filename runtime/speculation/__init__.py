"""Self-speculative decoding: the model drafts a few tokens cheaply and verifies them all in one step.

A draft is the same model with low-bit weights, no or little compensation, and the upper plane of a hierarchical cache;
the target is what decodes without speculation: its compensation, and both planes. Verification computes the target's
logits of all drafted tokens at once, and rejection sampling keeps what comes out distributed as the target's own.

Source: QuantSpec §4.1, Algorithm 1; Leviathan et al. 2023 for the rejection sampling.
"""
