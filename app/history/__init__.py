"""Chat history: saved chats in SQLite, with search, export and import."""
