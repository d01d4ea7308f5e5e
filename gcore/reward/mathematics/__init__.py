"""Mathematical answers: find the answer in a response, read it as a typed value, compare two values.

Start with `grading`, which defines equality. `values` parses a text into a value; `notation` normalizes a text and
extracts units and money. SymPy is imported with the package.
"""
