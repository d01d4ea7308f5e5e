"""`python -m gcore.quickstart`: makes what an example needs."""

import sys

from gcore.quickstart.main import main

if __name__ == "__main__":
    sys.exit(main())
