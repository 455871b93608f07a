"""What to buy: capacity curves, break-even of a tier, recommendations."""
