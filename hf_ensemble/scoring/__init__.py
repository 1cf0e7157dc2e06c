"""How likely given texts are."""
