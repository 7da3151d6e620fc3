"""The engine: requests are scheduled, decoded and speculated on, and their conversations kept."""
