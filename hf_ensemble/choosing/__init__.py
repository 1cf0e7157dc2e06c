"""Choosing members, weights and options."""
