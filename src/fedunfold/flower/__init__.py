"""The same federation over Flower: real clients, real network, data stay where they are (extra `flower`)."""
