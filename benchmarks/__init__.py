"""Everything that measures: how fast the engine is beside others, in turn in one run on data of the paper's shapes;
what the outer steps of learning are worth; what a device takes; and how many files a round runs through."""
