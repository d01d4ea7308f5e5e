"""`python -m gcore.prompts.tables`: converts Parquet and Arrow tables; started by the process that opens the data."""

from gcore.data.tables import main

if __name__ == "__main__":
    raise SystemExit(main())
