"""Storing new keys and values in the page pool, in place."""
