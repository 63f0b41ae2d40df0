"""`python -m mstar`: the same as `mstar`."""

from __future__ import annotations

import sys

from mstar.cli.main import main

sys.exit(main())
