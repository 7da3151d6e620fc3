"""Operations of every backend in plain torch: an oracle for each, and the shared arithmetic."""
