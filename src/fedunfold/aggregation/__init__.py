"""From a round's updates to one direction: absent clients, robust means, rejection of bad updates."""
