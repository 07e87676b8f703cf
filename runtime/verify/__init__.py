"""Whether a kernel is right, against the fp64 reference."""
