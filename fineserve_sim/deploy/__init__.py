"""What leaves the house: the placement of an experiment as files that start stock vLLM engines."""
