"""`python -m gcore.media`: the process of a node's blob store, under its supervisor or started by hand."""

import sys

from gcore.media.server import main

if __name__ == "__main__":
    sys.exit(main())
