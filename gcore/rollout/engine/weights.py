"""Other weights for a loaded model, and putting its weights to sleep.

New weights are first read into host memory (`stage`, in any thread) and compared with what the model has: names and
shapes must all fit before anything is written (`install`, between decode steps). A folder whose names differ from the
module's own (older checkpoints, fused experts) is read through transformers instead, which knows how to convert them.

Asleep, weights stand where they cost no memory of the device: those of a GPU in host memory, those of a CPU in a file
under the system's temporary folder (`TMPDIR`), whence they come back bit for bit. The file has no name, so none is left
behind however the process ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from gcore.errors import EngineError
from gcore.free_memory import give_back_free_memory
from gcore.rollout.engine.cache import CacheShape


class Loaded(Protocol):
    """A model in memory. `asleep`: whether its weights are released."""

    module: Any
    asleep: bool

    @property
    def shape(self) -> CacheShape:
        """The weights' type, and where they are; of a cache only what has one."""
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights in host memory that fit the model; by the module's names."""

    tensors: Mapping[str, torch.Tensor]


def check_awake(model: Loaded) -> None:
    """Raises EngineError while the weights are released: there is nothing to look at or to write to."""
    if model.asleep:
        raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")


def stage(model: Loaded, folder: Path) -> Staged:
    """Read a folder's weights. Raises EngineError, and nothing has changed, when they do not fit."""
    check_awake(model)
    own: dict[str, torch.Tensor] = model.module.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    try:
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            with safe_open(file, framework="pt") as weights:
                tensors.update({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
        if tensors.keys() - own.keys():
            tensors = dict(_converted(model, folder))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError(
            f"cannot read the weights ({' '.join(str(error).split())[:300]})",
            where=str(folder),
            fix="Publish them again",
        ) from error
    if not files:
        raise EngineError("there are no weights (*.safetensors)", where=str(folder), fix="Publish a whole model folder")
    # Tied weights stand in a checkpoint once.
    written = {own[name].data_ptr() for name in tensors if name in own}
    missing = sorted(name for name in own.keys() - tensors.keys() if own[name].data_ptr() not in written)
    unknown = sorted(tensors.keys() - own.keys())
    wrong = sorted(n for n, t in tensors.items() if n in own and t.shape != own[n].shape)
    coded = sorted(n for n, t in tensors.items() if n in own and not same_kind(t, own[n]))
    for names, what in (
        (missing, "lacks"),
        (unknown, "has, unknown to the model,"),
        (wrong, "has in another shape"),
        (coded, "has as whole numbers"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(f"the weights do not fit: the folder {what} {names[0]}{more}", where=str(folder))
    return Staged(tensors)


def _converted(model: Loaded, folder: Path) -> Mapping[str, torch.Tensor]:
    # The class that serves already, which may be one that came with the model.
    module, report = type(model.module).from_pretrained(
        folder,
        config=model.module.config,
        dtype=model.shape.dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers makes these up at random and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"they lack {missing[0]} and have {sorted(report['unexpected_keys'])[:1]}")
    state: dict[str, torch.Tensor] = module.state_dict()
    return state


def same_kind(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether one can stand for the other: whole numbers where fractions belong are a code that nobody here can read."""
    return tensor.is_floating_point() == own.is_floating_point()


def install(model: Loaded, staged: Staged) -> None:
    """Write staged weights over the model's own."""
    own: dict[str, torch.Tensor] = model.module.state_dict()
    with torch.no_grad():
        for name, tensor in staged.tensors.items():
            own[name].copy_(tensor)


class Bed:
    """Where a model's weights sleep."""

    def __init__(self, model: Loaded) -> None:
        self._model = model
        self._file: IO[bytes] | None = None
        self._shapes: list[torch.Size] = []

    def put_to_sleep(self) -> None:
        """Free the weights' memory. Raises EngineError, and nothing has changed, when there is no room for the file."""
        model = self._model
        if model.shape.device.type != "cpu":
            model.module.to("cpu")
            torch.cuda.empty_cache()
        else:
            self._spill()
            give_back_free_memory()
        model.asleep = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        # Tied ones once.
        return list(self._model.module.parameters())

    def _spill(self) -> None:
        # Without a name, so that nothing is left behind however the process ends.
        file = tempfile.TemporaryFile(prefix="gcore-asleep-")  # noqa: SIM115  # open until the weights are awake
        try:
            for parameter in self._parameters():
                file.write(_bytes_of(parameter.data.contiguous()))
            file.flush()
        except OSError as error:
            file.close()
            raise EngineError(
                f"the weights cannot be put aside ({error.strerror or error})",
                where=tempfile.gettempdir(),
                fix="Make room there, or let TMPDIR name another folder",
            ) from error
        self._shapes = [parameter.shape for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._file = file

    def wake(self) -> None:
        """The weights come back."""
        model = self._model
        if self._file is None:
            model.module.to(model.shape.device)
        else:
            self._file.seek(0)
            for parameter, shape in zip(self._parameters(), self._shapes, strict=True):
                data = torch.empty(shape, dtype=parameter.dtype)
                self._file.readinto(_bytes_of(data))  # type: ignore[attr-defined]
                parameter.data = data
            self._file.close()
            self._file = None
        model.asleep = False


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)
