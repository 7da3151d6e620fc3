"""OpenAI's protocol: requests checked, answers written, as bodies and as streams."""
