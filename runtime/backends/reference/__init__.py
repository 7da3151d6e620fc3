"""The reference backend: plain torch in float32 from the same packed file, the oracle of the faster backends."""
