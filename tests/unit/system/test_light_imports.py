"""The imports of each program at its entry: controllers, supervisors, commands and the edges of all workers start without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import controllers
import gcore
from gcore.system.process import GUARD

PYDANTIC = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
GRPC = {"google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools"}
HTTPX = {
    "anyio",
    "certifi",
    "click",
    "h11",
    "httpcore",
    "httpx",
    "idna",
    "markdown_it",
    "mdurl",
    "pygments",
    "rich",
    "sniffio",
}
RANK = PYDANTIC | GRPC | {"numpy", "yaml"}
ENGINE = PYDANTIC
ENTRIES: dict[str, set[str]] = {
    "controllers.cli.main": PYDANTIC | {"annotated_doc", "shellingham", "typer"},
    "controllers.daemon.__main__": set(),
    "gcore.agents.__main__": set(),
    "gcore.emulated.host": PYDANTIC
    | {"anyio", "click", "h11", "idna", "numpy", "sniffio", "starlette", "tokenizers", "uvicorn"},
    "gcore.emulated.rank": RANK,
    "gcore.engines.emulated.law": PYDANTIC | {"numpy"},
    "gcore.engines.diffusers.__main__": ENGINE,
    "gcore.engines.hf.__main__": ENGINE,
    "gcore.engines.sglang.__main__": PYDANTIC | HTTPX,
    "gcore.engines.sglang_diffusion.__main__": ENGINE,
    "gcore.engines.torch.__main__": ENGINE,
    "gcore.engines.vllm.__main__": set(),
    "gcore.environments.__main__": set(),
    "gcore.media.__main__": PYDANTIC | {"anyio", "click", "httpx", "idna", "pygments", "rich", "starlette", "uvicorn"},
    "gcore.models.__main__": {"tenacity"},
    "gcore.prompts.tables": {"numpy", "pyarrow"},
    "gcore.quickstart.__main__": PYDANTIC | {"rich"},
    "gcore.reward.__main__": PYDANTIC,
    "gcore.rollout.agents.__main__": set(),
    "gcore.rollout.engine.__main__": ENGINE,
    "gcore.rollout.environments.__main__": set(),
    "gcore.rollout.sglang.__main__": PYDANTIC | HTTPX,
    "gcore.system.guard": set(),
    "gcore.tracking.__main__": PYDANTIC,
    "gcore.train.__main__": RANK,
    "gcore.train.objectives": PYDANTIC | {"numpy", "torch", "torchgen", "tqdm", "yaml"},
    "gcore.train.rank.selftest": set(),
    "gcore.worker.main": PYDANTIC,
    "gcore.worker.sandbox.jail": set(),
    "gcore.worker.sandbox.probe": set(),
}
"""Each program, and the packages of others that it may have loaded once its module is imported.

The rest comes later, when variables are set and torch's compiler is left out, or never. A package more is paid for at each start."""

PUBLIC: dict[str, set[str]] = {
    "gcore": set(),
    "gcore.client": set(),
    "gcore.errors": set(),
    "gcore.flows": PYDANTIC | {"yaml"},
    "gcore.rollout.agents.api": set(),
    "gcore.rollout.environments.api": set(),
    "gcore.reward": PYDANTIC,
    "gcore.types": set(),
    "placement.placer": PYDANTIC,
}
"""What packages of users import, likewise."""

HEAVY = ("torch", "transformers", "deepspeed", "safetensors.torch", "sglang", "pyarrow")
LIGHT = (
    "controllers.daemon.daemon",
    "gcore.engines.sglang.adapter",
    "gcore.testing.contracts",
)

PROGRAM = """
import importlib, json, os, sys
ours = {"gcore", "controllers", "placement", *sys.modules}
for name in json.loads(sys.argv[1]):
    if os.fork() == 0:
        importlib.import_module(name)
        found = {one.partition(".")[0] for one, module in sys.modules.items() if module is not None}
        kept = sorted(one for one in found - ours - set(sys.stdlib_module_names) if not one.startswith("_") and one != "cython_runtime")
        print(json.dumps([name, kept]), flush=True)
        os._exit(0)
    os.wait()
"""


def packages_of_others(modules: list[str]) -> dict[str, set[str]]:
    """Of each module, imported by a process of its own: the packages that are neither Python's nor gcore's."""
    words = [sys.executable, "-P", "-c", PROGRAM, json.dumps(modules)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: set(found) for name, found in map(json.loads, lines)}


def too_many(allowed: dict[str, set[str]]) -> dict[str, set[str]]:
    """Of each module the packages that it may not have loaded; none of those that have what they may."""
    found = packages_of_others(list(allowed))
    assert list(found) == list(allowed), "a module cannot be imported"
    return {name: found[name] - allowed[name] for name in allowed if found[name] - allowed[name]}


def loaded(modules: tuple[str, ...], heavy: tuple[str, ...]) -> str:
    """The modules of `heavy` that a new process has loaded after each import, one line for each import that loaded any."""
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"    found = [one for one in {heavy!r} if one in sys.modules]\n    if found: print(name, found)\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_each_program_has_loaded_at_its_entry_only_the_packages_that_are_named_here() -> None:
    """Engines and ranks set variables and leave torch's compiler out before they load torch: an import at the top is too soon."""
    assert too_many(ENTRIES) == {}


def test_public_modules_load_only_the_listed_packages() -> None:
    assert too_many(PUBLIC) == {}


def test_a_package_that_is_not_named_would_be_found() -> None:
    assert too_many({"gcore.engines.emulated.law": PYDANTIC, "gcore.types": set()}) == {
        "gcore.engines.emulated.law": {"numpy"}
    }


def test_each_program_is_named_here() -> None:
    found = set()
    for package in (controllers, gcore):
        folder = Path(next(iter(package.__path__)))
        for file in folder.rglob("*.py"):
            if "templates" not in file.parts and '__name__ == "__main__"' in file.read_text(encoding="utf-8"):
                found.add(".".join(file.relative_to(folder.parent).with_suffix("").parts))
    assert found == set(ENTRIES)


def test_daemons_adapters_and_contracts_import_no_heavy_package() -> None:
    assert loaded(LIGHT, HEAVY) == ""


def test_no_process_loads_slow_modules_of_python_with_gcore_itself() -> None:
    """Every process has these modules, and those of rewards, tools and agents are started thousands of times."""
    slow = ("asyncio", "ctypes", "difflib", "importlib.resources", "random", "shutil", "tempfile")
    assert loaded(("gcore", "gcore.errors", "gcore.types"), slow) == ""


def test_a_process_enters_its_group_and_its_tether_with_few_modules() -> None:
    """enter and tether become another program, so an import takes longer than their work."""
    program = (
        "import sys\nfile = sys.argv[1]\nexec(compile(open(file).read(), file, 'exec'), {'__name__': 'guard'})\n"
        "print([one for one in ('contextlib', 'ctypes', 'select', 'signal', 'subprocess') if one in sys.modules])"
    )
    guard = [*GUARD[:-1], "-c", program, GUARD[-1]]
    assert subprocess.run(guard, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_daemon_without_a_job_has_neither_numpy_nor_the_search_of_placements() -> None:
    """With numpy it would be a sixth larger; a first placement comes with the first job."""
    assert loaded(("controllers.daemon", "controllers.daemon.daemon"), ("numpy", "placement.mapping")) == ""


def test_a_heavy_package_would_be_found() -> None:
    assert loaded(("json", "numpy"), ("numpy",)) == "numpy ['numpy']\n"
