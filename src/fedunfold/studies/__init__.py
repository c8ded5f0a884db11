"""The paper's experiments and ours beyond it, their tables and figures, and the convergence theory."""
