"""Members: models, their states for the rows of a call, and their caches."""
