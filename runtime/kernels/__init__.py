"""The operations a decoder is made of, one folder each: `reference.py` in plain torch, faster versions beside it."""
