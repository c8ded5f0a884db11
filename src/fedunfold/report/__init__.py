"""One HTML file for one run folder or several: what the runs found, in sentences, charts and tables."""
