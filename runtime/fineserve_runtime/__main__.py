"""``python -m fineserve_runtime`` is ``fineserve-run``."""

from fineserve_runtime.cli import main

main()
