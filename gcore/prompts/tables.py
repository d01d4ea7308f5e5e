"""`python -m gcore.prompts.tables`: a process that converts Parquet and Arrow tables of prompts.

The process that opens a job's data starts it. The code is in `gcore.data.tables`.
"""

from gcore.data.tables import main

if __name__ == "__main__":
    raise SystemExit(main())
