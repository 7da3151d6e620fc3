"""Speculative decoding: a few tokens are drafted cheaply, and the model verifies them all in one step.

A draft is copied from the text so far, where its last tokens stood before. Or the model drafts for itself: with low-bit
weights, no or little compensation, and the upper plane of a hierarchical cache. The target is what decodes without
speculation: its compensation, and both planes. Verification computes the target's logits of all drafted tokens at once,
and rejection sampling keeps what comes out distributed as the target's own.

Source: QuantSpec §4.1, Algorithm 1; Leviathan et al. 2023 for the rejection sampling; Saxena 2023, Prompt Lookup
Decoding, for copied drafts.
"""
