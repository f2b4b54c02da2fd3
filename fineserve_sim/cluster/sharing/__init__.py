"""What engines share: the memory of a GPU (``domain``), its pace (``contention``), and the event of its next step end."""
