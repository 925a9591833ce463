"""Configs tuned for a GPU: the search for them, and their files."""
