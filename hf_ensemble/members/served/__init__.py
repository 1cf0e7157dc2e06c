"""Members behind a server that speaks vLLM's OpenAI-compatible completions."""
