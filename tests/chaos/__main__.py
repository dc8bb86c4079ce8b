"""The chaos suite: kill every kind of part of a running system in every phase, and check the books.

python -m tests.chaos                              the long form, which writes docs/chaos.md: about an hour
python -m tests.chaos --short --folder FOLDER      one kill of each kind in one run: about a minute
python -m tests.chaos --judged FOLDER/judged.json  write the page again
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests import conftest  # the environment that every process of a test inherits
from tests.chaos.machines import RayMachines
from tests.chaos.plan import long_plan, short_plan
from tests.chaos.report import shortfalls, write_report
from tests.chaos.suite import Judged, run_leg, write_results

PAGE = conftest.ROOT / "docs" / "chaos.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a form of the suite; 1 when the books of a run are wrong, or the long form is incomplete."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the runs; otherwise they are removed")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--leg", help="only the legs whose name has this in it, and no page")
    args = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = args.folder or Path(temporary)
        legs = short_plan() if args.short else long_plan(args.seed)
        legs = [leg for leg in legs if (args.leg or "") in leg.name]
        judged: list[Judged] = []
        with RayMachines() as machines:
            for leg in legs:
                judged += run_leg(leg, folder / leg.name.replace(" ", "_"), machines)
                write_results(folder / "judged.json", judged)
    whole = not (args.short or args.leg)
    if whole:
        write_report(args.page, judged, (time.monotonic() - began) / 60)
    found = shortfalls(judged) if whole else shortfalls(judged, kills=0, each=0)
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
