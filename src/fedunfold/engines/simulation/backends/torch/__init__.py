"""Local training step by step in torch: any model, any device."""
