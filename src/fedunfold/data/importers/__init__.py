"""Custom data from tables, image folders or a Hugging Face data set.

Every importer makes the same `ImportedData`; `export` writes it as one .npz, which environments read like any other.
"""
