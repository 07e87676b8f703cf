"""From a Source to a Cubin, kept on disk."""
