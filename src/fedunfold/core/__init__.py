"""What everything else is written against: the engine contract, its messages, tasks, parameters and errors."""
