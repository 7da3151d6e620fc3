"""Operations that every backend computes, in plain torch: an oracle for each, and the arithmetic that all share."""
