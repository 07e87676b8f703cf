"""FlashAttention-2: mma.sync and cp.async, sm_80 and later."""
