"""The instructions of a program, each a routine with machine code of its own."""
