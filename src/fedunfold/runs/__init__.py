"""The folder a run leaves behind: writing, reading, resuming and repeating it."""
