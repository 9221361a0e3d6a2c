"""Architectures: the public configurations of models, without weights, as data files beside this one."""
