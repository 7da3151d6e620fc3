"""Attention on the CPU: over half precision (`span`) and over packed pages."""
