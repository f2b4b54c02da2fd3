"""What engines share: the memory of a GPU (``domain``) and its pace (``contention``)."""
