"""What every backend computes, written plainly: an oracle for each operation, and the arithmetic that all share."""
