"""The loop over rounds, its state, and comparisons of methods."""
