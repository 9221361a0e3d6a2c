"""Targets: what programs can be compiled for, as data files beside this one."""
