"""Creates the data and the small models of the examples (`gcore prepare`) and of new projects (`gcore init`).

`__main__` lists the examples; read `folder` first. Preparing an example trains a small model and imports torch inside
the function, so importing this package does not import torch.
"""

NAMES = (
    "arithmetic",
    "arithmetic-judge",
    "arithmetic-judge-adapter",
    "calculator",
    "counting",
    "counting-judge",
    "pictures",
    "pictures-ddim",
    "pictures-judge",
    "zoom",
)
"""Names of the examples. Defined here so that the help of the command line need not import the modules that create
them."""
