"""Secure sums: the server learns Σ_k v_k of its clients' vectors, and no single v_k, whatever it sends them.

References: Bonawitz et al. 2017, Practical Secure Aggregation for Privacy-Preserving Machine Learning, in its form
against active servers; Bell et al. 2020, Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, for who are
neighbours. The primitives are those of the packages cryptography and PyCryptodome, which Flower brings along.
"""
