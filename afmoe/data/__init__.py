"""From a data file to batches: sources, chat rendering, packing, the plan of an epoch, the data module."""
