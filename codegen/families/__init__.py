"""A folder for each family of kernels: how attention is computed."""
