"""From a data file to batches: sources of rows, chat rendering, packing, the plan of an epoch, the Lightning module."""
