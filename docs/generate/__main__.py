"""``python -m docs.generate`` in the root of a clone writes the generated parts of the pages. What takes longer is asked for:

--measure DIR       predict every measured set below DIR (two CPU minutes) and keep the errors in docs/data
--sharing           run Fig. 10's point under each way of sharing (half a minute); README.md's caption has the first
--sensitivity FILE  keep what benchmarks/sensitivity.py --quick --json has written to FILE
--outputs           run the commands of pages for users (half a minute) and show what they print now
"""

from __future__ import annotations

import argparse
from pathlib import Path

from docs.generate import write
from docs.generate.measure import measure, sensitivity, ways_of_sharing
from docs.generate.shown import renew, showing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="the folder with the measured sets")
    parser.add_argument("--sharing", action="store_true", help="run Fig. 10 under each way of sharing")
    parser.add_argument("--sensitivity", type=Path, metavar="FILE", help="the JSON of benchmarks/sensitivity.py")
    parser.add_argument("--outputs", action="store_true", help="renew what commands print")
    arguments = parser.parse_args()
    for page in showing() if arguments.outputs else ():
        renew(page)
    kept = list(measure(arguments.measure)) if arguments.measure else []
    kept += [ways_of_sharing()] if arguments.sharing else []
    kept += [sensitivity(arguments.sensitivity)] if arguments.sensitivity else []
    for path in (*kept, *write()):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
