"""Conversations: which tokens each slot of a cache holds, and their saved caches on disk."""
