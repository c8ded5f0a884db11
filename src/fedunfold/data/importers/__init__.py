"""A user's own data, gathered from tables, image folders or a Hugging Face data set: what `fedunfold env new` reads.

Every reader gives the same `ImportedData`; `writing` puts it into one .npz, which environments read like any other.
"""
