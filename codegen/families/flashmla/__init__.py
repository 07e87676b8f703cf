"""FlashMLA: decode over a compressed, paged cache, sm_90a."""
