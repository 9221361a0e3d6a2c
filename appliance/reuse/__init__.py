"""Reuse across requests: fingerprints of prompts, and the index in which near-duplicates find each other."""
