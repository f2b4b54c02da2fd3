"""Evidence: what shows that the simulator's predictions agree with measurements.

* ``validate`` predicts end-to-end results that others measured.
* ``sharing`` compares the laws of sharing a GPU with measured slowdowns.
* ``crossvalidation`` predicts rows that were left out of the latency tables.
* ``claims`` decides the papers' claims that need a GPU.
* ``campaign`` measures on a GPU what the simulator should predict, and compares.

This package stands on the calibrator. The calibrator does without it, and takes in its ``commands`` alone.
"""
