"""An app in PyTorch: a small network, its state_dict as the arrays that are sent."""
