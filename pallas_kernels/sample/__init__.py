"""Choosing the next id of each row from its logits."""
