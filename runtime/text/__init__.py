"""Text on its way in and out: tokenizer, chat template, tool calls, grammar constraints, sampling, stop strings."""
