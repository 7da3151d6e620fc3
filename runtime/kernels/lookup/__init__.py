"""From the codes of a matrix with codebooks to the codebooks' entries."""
