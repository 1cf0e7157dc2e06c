"""Likelihoods of given texts."""
