"""FlashAttention-2 in Triton: the same specs for GPUs that no CUDA family serves, and for those that one does."""
