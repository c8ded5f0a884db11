"""Local training of a round: step by step in torch, or as compiled code on a CPU or GPU."""
