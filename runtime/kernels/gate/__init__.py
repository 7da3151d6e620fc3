"""The gate of the MLP."""
