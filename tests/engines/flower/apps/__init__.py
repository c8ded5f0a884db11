"""Flower apps as people have them, written for FedAvg."""
