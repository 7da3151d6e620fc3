"""The making of the bundled model `demo`: its dialogues, its tokenizer, its training and its packing.

The way: `content/*.toml` → `exchange`, `topics`, `facts`, `numbers`, `measures`, `person`, `tales`, `unknown` and
`manner` → `corpus` (conversations) → `vocabulary` (tokenizer) → `batches` → `network`, `muon`, `train` → `questions`,
`score` → `pack`. Only training, scoring and packing need torch, and import it when they run.
"""
