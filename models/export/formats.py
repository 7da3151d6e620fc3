"""Formats of other programs in which a stored model can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

ExportFormat = Literal["gguf", "awq", "gptq", "compressed-tensors"]
"""`gguf` is a file for llama.cpp, the others are folders for vLLM and SGLang."""
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
"""All formats."""
Step = Callable[[], None]
"""Called before each matrix; raises to stop."""
