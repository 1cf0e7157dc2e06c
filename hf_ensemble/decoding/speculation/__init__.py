"""Decoding with drafts."""
