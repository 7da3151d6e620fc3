"""The slowdown budget: tuning decoding and prompts to it, what it buys, and the profiles that keep the result."""
