"""Files, messages and arguments of anybody's making: each is either understood or refused in one line.

    python -m tests.fuzz --cases 50000 --seed 0     spreads mutated cases over all formats, and prints a table
    python -m tests.fuzz --engine atheris           the same formats, guided by coverage (pip install atheris)
    python -m tests.fuzz --write-corpus             makes the valid files that mutation starts from anew

A format is a module of `formats` with `fuzz(data)`, which says whether the data were understood, `seeds()`, which makes
valid ones, and `mutate(data, rng)`. Cases run in a process of their own that may allocate 1 GB more than it started
with, write nowhere but into its scratch folder, and start or load nothing.
"""
