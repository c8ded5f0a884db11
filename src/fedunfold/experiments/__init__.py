"""Whole experiments over an environment: learn weights, run a method, compare several."""
