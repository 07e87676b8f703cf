"""FlashAttention-1 as first published: keys in the outer loop, O in device memory. For teaching; sm_80 and later."""
