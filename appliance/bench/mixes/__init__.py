"""Mixes: workloads as quantiles of lengths with their sources, as data files beside this one."""
