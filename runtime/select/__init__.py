"""From a call to the kernel that serves it."""
