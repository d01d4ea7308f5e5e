"""Data and small models of the examples: `gcore prepare`, `gcore init`.

`__main__` lists them; read `folder` first. Preparing an example trains a small model and imports torch inside the function, so importing this
package does not import torch.
"""

NAMES = ("arithmetic", "arithmetic-judge", "calculator")
"""Names of the examples. Defined here because the command line must not import the modules that make them for its help."""
