"""How the bundled model `demo` is made: its dialogues, its tokenizer, its training and its packing.

The way: `content/*.toml` → `exchange`, `topics`, `numbers`, `tales` → `corpus` (conversations) → `vocabulary`
(tokenizer) → `batches` → `train` → `score` → `pack`. Only the last four need torch, and import it when they run.
"""
