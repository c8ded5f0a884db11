"""Federations whose clients are real: centres, hospitals, people, speakers. One file for each, and one
for the two that come with scikit-learn."""
