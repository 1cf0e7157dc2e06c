"""Which members, which weights, which options."""
