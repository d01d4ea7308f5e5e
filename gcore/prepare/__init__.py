"""What the examples need before they can run: their data and a model to begin with.

`gcore.prepare.arithmetic` is the only one. Preparing trains a small model and so imports torch, inside the function; to
import this package does not.
"""
