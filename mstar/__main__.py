"""`python -m mstar`: the same as `mstar`."""

from __future__ import annotations

import sys

from mstar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
