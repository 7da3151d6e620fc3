"""Choice of the salient input channels of a linear layer at every decode step (QDEC §4.3)."""
