"""Checking the members of an ensemble: what is wrong with them, why that matters, and what to do."""
