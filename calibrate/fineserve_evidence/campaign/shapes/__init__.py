"""What two shapes of a model over one set of weights need of a GPU: trials of a campaign's part ``shapes``.

Each trial is a process: ``python3 -m fineserve_evidence.campaign.shapes TRIAL MODEL cuda|cpu`` prints its numbers as JSON.

============ ===========================================================================================================
trial        measures
============ ===========================================================================================================
``ipc``      the runtime's region, made here and opened in a second process by CUDA IPC
``handles``  pages of 2 MiB, exported as VMM handles and mapped in a second process
``nccl``     process groups of one rank, and of two where there are two GPUs
``gloo``     process groups of two ranks on the host
``graphs``   CUDA graphs of a whole stack of layers and of its first half, over the same weights
``asleep``   a vLLM engine awake, and asleep at both levels
============ ===========================================================================================================

Bytes are differences of what the driver says all processes hold. Nothing else may start or end on the GPU meanwhile.
"""
