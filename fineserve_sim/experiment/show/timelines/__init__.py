"""What happened when in one stored run: the life of a request, and a trace file for Perfetto or chrome://tracing."""
