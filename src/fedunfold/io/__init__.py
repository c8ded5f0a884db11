"""Reading and writing files: atomic writes, checkpoints, safetensors, and the limits on what is read."""
