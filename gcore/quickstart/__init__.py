"""What the examples need before they can run: their data and a model to begin with, or a judge of what a model writes.

`__main__` lists them; read `folder` first. Preparing trains a small model and imports torch inside the function; importing this
package does not import it.
"""

NAMES = ("arithmetic", "arithmetic-judge", "calculator")
"""Of the examples; here, because the command line must not import what makes them for its help."""
