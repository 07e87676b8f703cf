"""Standard attention: three kernels, with scores and weights in device memory. The baseline; sm_80 and later."""
