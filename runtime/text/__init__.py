"""Text processing: tokenizer, chat template, tool calls, grammar constraints, sampling, stop strings."""
