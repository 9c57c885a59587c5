"""The steps of plans from short batches, in several processes, and what was found so far."""
