"""Loading members, and saving and sharing ensembles."""
