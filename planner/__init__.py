"""Decides everything before and between steps; no sockets, no clock, no threads."""
