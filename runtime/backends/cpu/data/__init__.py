"""Data structures shared by Python and compiled code: programs, weight tiles, pages."""
