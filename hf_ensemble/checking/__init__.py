"""Checks for faults of an ensemble's members: what is wrong, why it matters, and what to do."""
