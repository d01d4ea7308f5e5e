"""What the examples need before they can run: their data and a model to begin with, or a judge of what a model writes.

`gcore.prepare.examples` lists them. Preparing trains a small model and so imports torch, inside the function; to import this
package does not.
"""

NAMES = ("arithmetic", "arithmetic-judge", "calculator")
"""Of the examples; here, because the command line must not import what makes them for its help."""
