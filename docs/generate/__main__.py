"""``python -m docs.generate [--measure DIR] [--sensitivity FILE] [--outputs]`` in the root of a clone.

Writes the generated blocks of the pages. ``--measure`` first predicts every measured set below DIR (two CPU minutes) and keeps
the errors in ``docs/data``; ``--sensitivity`` keeps what ``benchmarks/sensitivity.py --quick --json`` has written to FILE;
``--outputs`` runs the commands of the tutorial and the how-to pages and shows what they print now.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from docs.generate import write
from docs.generate.measure import measure, sensitivity
from docs.generate.shown import renew, showing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="the folder with the measured sets")
    parser.add_argument("--sensitivity", type=Path, metavar="FILE", help="the JSON of benchmarks/sensitivity.py")
    parser.add_argument("--outputs", action="store_true", help="renew what commands print")
    arguments = parser.parse_args()
    for page in showing() if arguments.outputs else ():
        renew(page)
    kept = list(measure(arguments.measure)) if arguments.measure else []
    kept += [sensitivity(arguments.sensitivity)] if arguments.sensitivity else []
    for path in (*kept, *write()):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
