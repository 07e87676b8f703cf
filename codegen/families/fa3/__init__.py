"""FlashAttention-3: TMA, wgmma and warp roles, sm_90a."""
