"""Conversations, and how each member reads them."""
