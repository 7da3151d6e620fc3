"""Scheduling: the life of one request (`request`, `answer`), and the shares of many in each step (`scheduler`)."""
