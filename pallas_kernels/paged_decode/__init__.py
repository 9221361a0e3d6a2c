"""Attention of one new token a sequence against paged keys and values."""
