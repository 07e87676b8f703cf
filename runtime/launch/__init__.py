"""From a Cubin to a running kernel."""
