"""Export of stored models into the formats of other programs: GGUF files, and AWQ, GPTQ and compressed-tensors folders.

`export` is the door. `matrices` restores rows of a stored matrix, `gguf_file` and `gguf_tokenizer` write for llama.cpp,
`folder` and `int4` for vLLM and SGLang. Nothing here imports torch, and this package is cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

ExportFormat = Literal["gguf", "awq", "gptq", "compressed-tensors"]
"""`gguf` is a file for llama.cpp, the others are folders for vLLM and SGLang."""
Step = Callable[[], None]
"""Called before each matrix; raises to stop."""
