"""Speculative decoding: tokens are drafted cheaply, and the model verifies several in one step.

Drafts are copied from earlier text that continued after the same tokens, or drafted by the model itself: with its
low-bit weights, no or little compensation, and only the upper plane of a hierarchical cache. The target is the model as
it decodes without speculation: with its compensation, and both planes. Verification computes the target's logits of all
drafted tokens at once, and rejection sampling keeps the output distributed as the target's own.

Source: QuantSpec §4.1, Algorithm 1; Leviathan et al. 2023 for the rejection sampling; Saxena 2023, Prompt Lookup
Decoding, for copied drafts.
"""
