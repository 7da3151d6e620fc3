"""Triton's interpreter, where there is no card."""

from tests.runtime.backends.triton.conftest import _language_is_patched_once

__all__ = ["_language_is_patched_once"]
