"""Learning a rule once, by unfolding over many simulated federations, for federations it has never met."""
