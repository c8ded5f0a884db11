"""The app in PyTorch once more, with the lines changed by which weights are learned for its own train function."""
