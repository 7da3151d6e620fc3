"""The end of a step: the logits."""
