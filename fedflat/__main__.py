"""`python -m fedflat` is the `fedflat` command."""

import sys

from fedflat.cli import main

sys.exit(main())
