"""The gated delta rule on the GPU: row by row, and for prompts in chunks."""
