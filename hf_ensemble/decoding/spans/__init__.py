"""Decoding span by span."""
