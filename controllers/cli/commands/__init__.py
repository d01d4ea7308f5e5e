"""The commands of `gcore`, by subject. Each module holds the functions that typer calls."""
