"""Attention over dense and varlen sequences."""
