"""Export of stored models into the formats of other programs: GGUF files, and AWQ, GPTQ and compressed-tensors folders.

`export` is the door. `matrices` restores rows of a stored matrix, `gguf_file` and `gguf_tokenizer` write for llama.cpp,
`folder` and `int4` for vLLM and SGLang. Nothing here imports torch, and this package is cheap to import.
"""
