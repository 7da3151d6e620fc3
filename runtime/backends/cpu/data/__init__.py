"""What stands in memory, described once for its writers and its readers: programs, tiles of weights, pages."""
