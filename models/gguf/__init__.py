"""GGUF files, llama.cpp's format, as checkpoints: one file with metadata, weights in ggml's types, and the tokenizer.

What is read here becomes what a Hugging Face folder holds: `config` makes a config.json, `tensors` dequantizes weights
and gives them their names and order of rows, `tokenizer` makes a tokenizer.json. Importing this loads nothing heavy.
"""
