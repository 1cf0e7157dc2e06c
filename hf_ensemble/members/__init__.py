"""Members: models, their state for the rows of a call, and the caches behind it."""
