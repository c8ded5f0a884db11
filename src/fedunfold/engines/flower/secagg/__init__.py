"""Secure sums: the server learns Σ_k v_k of its clients' vectors, and no single v_k.

Reference: Bonawitz et al. 2017, Practical Secure Aggregation for Privacy-Preserving Machine Learning. Keys, encryption
and secret sharing are Flower's primitives; its mask generator has 32 bits of seed, which can be tried out, and its
quantiser 32-bit integers, so masks and numbers are made here.
"""
