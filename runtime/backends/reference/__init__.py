"""The reference backend: plain torch in float32, reading the same packed file; the oracle of the faster backends."""
