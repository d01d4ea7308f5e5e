"""Run `python -m deploy.tools`."""

from __future__ import annotations

import sys

from deploy.tools.files import main

sys.exit(main())
