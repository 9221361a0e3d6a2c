"""Facts of the accelerators that kernels are compiled for, one JSON file each."""
