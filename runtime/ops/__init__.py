"""A folder for each operation: what is asked, and what is right."""
