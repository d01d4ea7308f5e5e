"""A plug-in of pytest (`-p mutated`): the tests run against gcore with the mutation that GCORE_MUTATION names.

It is in place before any test is imported, so that what tests take from gcore by name is mutated too.
"""

from __future__ import annotations

import os

from mutations import MUTATIONS

IN_PLACE = MUTATIONS[os.environ["GCORE_MUTATION"]].applied()
IN_PLACE.__enter__()
