"""Data and small models of the examples: `gcore prepare`, `gcore init`.

`__main__` lists them; read `folder` first. Preparing trains a small model and imports torch inside the function; importing this
package does not import it.
"""

NAMES = ("arithmetic", "arithmetic-judge", "calculator")
"""Of the examples; here, because the command line must not import what makes them for its help."""
