"""Learn aggregation weights in a federation, and train with them."""
