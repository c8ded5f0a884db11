"""What carries out a round: the simulation in this process, or Flower over a network."""
