"""source -> cubin -> kernel: compiler, cache, driver, look-up, torch ops and what is measured with them."""
