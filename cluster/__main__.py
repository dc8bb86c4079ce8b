"""`python -m cluster` is the same command as `flowcredit`."""

import sys

from cluster.cli import main

sys.exit(main())
