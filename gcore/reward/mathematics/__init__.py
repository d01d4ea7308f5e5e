"""Mathematical answers: find the answer in a response, read it as a typed value, compare two values.

Begin with `grading`, which says what counts as equal. `values` reads a text as a value; `notation` writes a text in one notation and
takes units and money from it. SymPy is imported with the package.
"""
