"""Standard attention: three kernels, with S and P in device memory. The baseline; sm_80 and later."""
