"""Measured end-to-end results against the simulator's predictions.

    file --layout--> cases (an engine setting on a GPU, a load, and what was measured)
    case --predict--> TTFT and TPOT of the same rows --> median, p90 and bias of the relative errors --> table, JSON, figures

A file is recognised by its columns alone. A row's measurement never enters its prediction. A number that the set does not
record (requests, token budget) is an assumption. The command prints it, with how far the errors move without it.
"""
