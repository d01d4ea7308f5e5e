"""The algorithms work without the rest of gcore."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

from gcore.train import algorithms as package

FOREIGN = ("deepspeed", "transformers", "grpc", "etcd", "google.protobuf", "pydantic", "yaml", "aiohttp", "httpx")
MODULES = tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def test_all_modules_are_imported_in_a_fresh_interpreter_without_anything_else() -> None:
    imports = "; ".join(f"import {package.__name__}.{name}" for name in MODULES)
    program = (
        f"import sys; {imports}; "
        f"foreign = [m for m in sys.modules if m.partition('.')[0] in {FOREIGN!r} or m.startswith('google.protobuf')]; "
        "own = [m for m in sys.modules if m.startswith('gcore') and not m.startswith('gcore.train.algorithms')]; "
        "print(foreign, sorted(own))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] ['gcore', 'gcore.aliases', 'gcore.train']"


def test_the_learning_rate_needs_no_torch() -> None:
    program = "import sys\nimport gcore.config.train; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
