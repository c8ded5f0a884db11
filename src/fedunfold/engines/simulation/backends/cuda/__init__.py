"""On a GPU: a round's whole local training in one launch, for stacks of up to three linear layers."""
