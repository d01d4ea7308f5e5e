"""Checkers of the repository itself: what `make lint` runs besides ruff, mypy and import-linter.

Read `check_house` first: it holds the module tree in shape.
"""
