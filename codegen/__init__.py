"""spec -> plan -> source: pure Python, imports neither torch nor CUDA nor anything of runtime."""
