"""Many requests at once: what becomes of one (`request`, `answer`), and who gets what of each step (`scheduler`)."""
