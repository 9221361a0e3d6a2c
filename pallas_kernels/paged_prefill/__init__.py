"""Attention of prompt chunks against their own earlier pages and themselves."""
