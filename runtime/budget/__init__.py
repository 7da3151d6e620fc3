"""The slowdown budget: tunes decoding and prompts to it, and stores the results in profiles."""
