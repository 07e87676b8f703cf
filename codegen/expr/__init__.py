"""The language of score and mask expressions: text to tree to CUDA, values, gradients and ranges."""
