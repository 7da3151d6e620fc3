"""The chats that were had: kept in SQLite, found again, taken along and brought back."""
