"""The chat without a screen: conversations, their prompts, documents and tools, and answers as events."""
