"""How an ensemble takes part in the stock `generate`."""
