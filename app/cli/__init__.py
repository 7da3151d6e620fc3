"""Command line: one module per command. Heavy imports wait until a command needs them."""
