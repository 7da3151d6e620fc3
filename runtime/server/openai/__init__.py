"""OpenAI's protocol: validates requests, and writes responses as bodies and as streams."""
