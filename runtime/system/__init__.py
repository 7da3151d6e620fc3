"""Dealings with the system and with others: child processes, hosts, files that are ours alone, text from outside."""
