"""Gradients and Hessian-vector products of many copies of a model at once."""
