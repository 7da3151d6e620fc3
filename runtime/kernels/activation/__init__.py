"""INT8 quantization of activations, the left operand of the integer matrix products."""
