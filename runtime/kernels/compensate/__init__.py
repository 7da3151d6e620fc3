"""Error compensation: the residual rows of the selected channels, multiplied and added (QDEC §4)."""
