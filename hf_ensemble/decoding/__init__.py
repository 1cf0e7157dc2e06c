"""One `generate` call, step by step."""
