"""GGUF files, llama.cpp's format, as checkpoints: one file with metadata, weights in ggml's types, and the tokenizer.

The content is translated to that of a Hugging Face folder: `config` makes a config.json, `tensors` dequantizes, renames
and reorders weights, `tokenizer` makes a tokenizer.json. This package is cheap to import.
"""
