"""Meaning and speed of array operations; knows no model and no request."""
