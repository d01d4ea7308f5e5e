"""A user's environment after `make setup`, in which a test may install packages without changing ours.

A virtual environment that sees everything ours has, with `gcore`, `pip` and `pytest` on its PATH. It needs no
network.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

SCRIPTS = {"gcore": "controllers.cli.main", "pip": "pip", "pytest": "pytest"}


def make_user_venv(folder: Path) -> dict[str, str]:
    """Make it in `folder`; the environment variables in which its commands are found."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    ours = sysconfig.get_paths()["purelib"]
    theirs = next((folder / "lib").glob("python*/site-packages"))
    # addsitedir, and not a mere path: gcore itself is installed by a .pth file in ours.
    (theirs / "zz_ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for name, module in SCRIPTS.items():
        script = folder / "bin" / name
        # Not `-m`, which would put the current folder on the path, as no installed command does.
        script.write_text(
            f"#!{folder}/bin/python\nimport runpy, sys\nsys.argv[0] = {name!r}\n"
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=False)\n"
        )
        script.chmod(0o755)
    assert site.ENABLE_USER_SITE is not None
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return environment | {
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",  # what is documented must work offline
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "120",
    }
