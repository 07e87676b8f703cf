"""MLA decode over a paged cache."""
