"""Model: loads a causal model, runs a forward pass, updates and releases weights, and computes the size of the KV
cache.

A model folder that cannot be loaded completely is refused at start: weights that are truncated, missing or do not fit,
a configuration of an unknown architecture, a tokenizer with more tokens than the model. `runner_selection` decides
which runner serves a model that loads.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch.nn import functional
from transformers.utils import logging as transformers_logging

from gcore.data.tokenizer import end_tokens
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import DiffusersLaunch, EngineLaunch
from gcore.engines.pictures import PictureFeatures, PictureReader
from gcore.engines.torch.attention import NAME, EngineAttention
from gcore.engines.torch.fast_path import FastDecodeStep, patch_norms
from gcore.engines.torch.kv_cache import CacheShape
from gcore.errors import DataError, EngineError, UsageError, one_line
from gcore.models.adapter_checks import BaseFiles
from gcore.models.adapters import adapted_tensors, check_fit
from gcore.models.checks import check_code, check_loaded, require_config
from gcore.models.layout import ADAPTER_FILE, FROZEN_FILE
from gcore.models.row_adapters import AdapterMatrices, RowAdapters
from gcore.models.vision import auto_class, has_processor, has_vision, media_token_ids, set_text_attention
from gcore.system.memory import host_memory, is_out_of_memory, release_free_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOLERANCES = {torch.float32: 3e-4, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest difference of log-probabilities that rounding explains, in the trials of models at start."""

CONTEXT = 2048
"""Context length if neither the model nor the launch sets one."""

LARGE_VOCABULARY = 16_384

ALIGNMENT = 64
"""Alignment in bytes of each weight in memory."""

FORBIDDEN = -1e30
"""Logit of a token that is never sampled. Finite, so that reported log-probabilities are numbers."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class OutputHead:
    """Makes a model's output layer compute only the logits that are needed.

    `wanted`: rows and positions of the next forward pass; None: all of them. On a CPU with a large vocabulary the
    logits of a decode step are also written to a reused buffer.
    """

    def __init__(self, layer: Any, device: torch.device) -> None:
        self.wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._buffer = torch.zeros(0)
        self._layer = layer
        layer.register_forward_pre_hook(self._select)
        plain = type(layer) is torch.nn.Linear and layer.bias is None
        if plain and device.type == "cpu" and int(layer.weight.shape[0]) >= LARGE_VOCABULARY:
            layer.forward = self._into_buffer

    def _select(self, layer: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = arguments[0]
        if self.wanted is None or hidden.dim() != 3:
            return None
        rows, positions = self.wanted
        return (hidden[rows, positions][:, None], *arguments[1:])

    def _into_buffer(self, hidden: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self._layer.weight
        if self.wanted is not None or hidden.dim() != 3 or hidden.shape[1] != 1:
            return functional.linear(hidden, weight)
        rows = hidden.shape[0]
        if self._buffer.shape[0] < rows or self._buffer.dtype != hidden.dtype:
            self._buffer = torch.empty((rows, weight.shape[0]), dtype=hidden.dtype)
        return torch.mm(hidden[:, 0], weight.t(), out=self._buffer[:rows])[:, None]


@dataclass(slots=True)
class Model:
    """A loaded causal language model.

    `vocabulary`: number of tokens. `context`: context length in tokens. `end_tokens`: end a sample unless the request
    ignores them.
    """

    module: Any
    folder: Path
    attention: EngineAttention
    shape: CacheShape
    """Shape of the KV cache of `FastRunner` and `DeterministicRunner`; without layers until `select_runner` measured
    them.
    """
    head: OutputHead
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    trusted: bool = False
    """Whether code from the folder may run."""
    cache_name: str = "past_key_values"
    """Name of the cache argument of the model's forward."""
    asleep: bool = False
    """Whether the weights are released."""
    adapters: RowAdapters | None = None
    """Adapters at run time; None: weight updates add the policy's adapter to the weights."""
    base: BaseFiles | None = None
    """The folder's weight files when the model was loaded, to which updates add the policy's adapter."""
    vision: PictureFeatures | None = None
    """Runs the vision tower; None: the model has none."""
    forbidden: torch.Tensor | None = None
    """Token IDs [k] int64 that stand for media and are never sampled; None: there are none."""
    straight: FastDecodeStep | None = None
    """A faster, bitwise equal implementation of a pass with one token per row; None if there is none."""

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        *,
        wanted: tuple[Sequence[int], Sequence[int]] | None = None,
        pictures: Mapping[str, Any] = {},
    ) -> torch.Tensor:
        """Run a forward pass with the engine's KV cache, and return logits [row, vocabulary].

        `ids` and `positions` [row, token]; positions of pictures may be [3, row, token]. `wanted`: rows and positions
        whose logits are returned; None: those of the last position of each row. `pictures`: arguments for them.
        """
        if self.straight is not None and wanted is None and ids.shape[1] == 1:
            return self._masked(self.straight.logits(ids, positions, cache))
        arguments = {"input_ids": ids, "position_ids": positions, self.cache_name: cache, "use_cache": True}
        arguments |= pictures
        places = None if wanted is None else _places(wanted, ids.device)
        self.head.wanted = places
        try:
            logits: torch.Tensor = self.module(**arguments).logits
        finally:
            self.head.wanted = None
        return self._masked(_picked(logits, places))

    def forward_own(
        self,
        ids: torch.Tensor,
        cache: Any,
        *,
        positions: torch.Tensor | None = None,
        wanted: tuple[Sequence[int], Sequence[int]] | None = None,
        pictures: Mapping[str, Any] = {},
    ) -> tuple[torch.Tensor, Any]:
        """Like `forward`, but with the model's own kind of cache (None: a new one). Returns logits and cache.

        `positions`: None for models that count them themselves. Raises ValueError if the model has no cache.
        """
        places = None if wanted is None else _places(wanted, ids.device)
        self.head.wanted = places
        arguments = {"input_ids": ids, self.cache_name: cache, "use_cache": True, **pictures}
        try:
            out = self.module(**arguments, **({} if positions is None else {"position_ids": positions}))
        finally:
            self.head.wanted = None
        kept = getattr(out, self.cache_name, None)
        if kept is None:
            raise ValueError("the model has no cache")
        return self._masked(_picked(out.logits, places)), kept

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Make the logits of media tokens so small that these tokens have no probability."""
        if self.forbidden is not None:
            logits.index_fill_(-1, self.forbidden, max(FORBIDDEN, torch.finfo(logits.dtype).min))
        return logits

    @property
    def counts_positions(self) -> bool:
        """Whether a model with its own cache must be given positions, because pictures shift them."""
        return self.vision is not None and self.vision.reader.three

    def select_adapters(self, numbers: Sequence[int]) -> None:
        """Set the adapter of each row of the next forward pass, by its number."""
        if self.adapters is not None:
            self.adapters.select(numbers)

    def use_own_attention(self) -> None:
        """Switch to the engine's attention (`EngineAttention`). Raises ValueError if the model does not support it."""
        set_text_attention(self.module, NAME)

    def use_plain_attention(self) -> None:
        """Switch to transformers' eager attention, which a model uses after loading."""
        set_text_attention(self.module, "eager")


def _picked(logits: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    if places is None:
        return logits[:, -1]
    # A model that does not call its output layer as a module has computed the logits of all positions.
    return logits[:, 0] if logits.shape[:2] == (len(places[0]), 1) else logits[places]


def _places(wanted: tuple[Sequence[int], Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(wanted[0], device=device), torch.tensor(wanted[1], device=device)


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    context: int | None,
    text: Detokenizer | None,
    trust_remote_code: bool = False,
    adapters: Mapping[str, Path] | None = None,
    adapter_digests: Mapping[str, str] = {},
    blobs: Path | None = None,
) -> Model:
    """Load a causal language model from a local folder. Raises DataError if it cannot be served.

    `context`: maximum context length in tokens; None: the model's. `text`: the tokenizer, whose vocabulary is checked.
    `adapters`: folders of adapters at run time, by name. `adapter_digests`: that they must have. `blobs`: folder of the job's pictures.
    """
    config = require_config(folder)
    check_code(config, trusted=trust_remote_code, where=str(folder))
    eager: Any = {"text_config": "eager", "vision_config": "sdpa"} if has_vision(config) else "eager"
    base = BaseFiles.found(folder)
    module = load_module(
        auto_class(config), folder, DTYPES[dtype], trust_remote_code=trust_remote_code, attn_implementation=eager
    )
    c = module.config.get_text_config()
    length = context_length(c, context)
    head = module.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise unservable_model(folder, f"a {c.model_type} has no output layer")
    rope = getattr(c, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind in LENGTH_DEPENDENT_ROPE:
        raise unservable_model(folder, f"its positions ({kind}) depend on the longest sequence of the batch")
    vocabulary = int(head.weight.shape[0])
    check_vocabulary(text, vocabulary, folder)
    place = torch.device(device)
    module.to(place).eval().requires_grad_(False)
    align_weights(module)
    attention = EngineAttention()
    attention.register()
    parameters = inspect.signature(module.forward).parameters
    patch_norms(module)
    vision = None
    if has_vision(config) and has_processor(folder):
        vision = PictureFeatures(module, PictureReader(module, folder, blobs))
    media = media_token_ids(module.config)
    return Model(
        module,
        folder,
        attention,
        CacheShape((), DTYPES[dtype], place),
        OutputHead(head, place),
        vocabulary,
        length,
        end_tokens(folder, config, lambda token: None if text is None else text.token_id(token)),
        trusted=trust_remote_code,
        cache_name="cache_params" if "cache_params" in parameters else "past_key_values",
        adapters=RowAdapters(module, adapters, adapter_digests) if adapters else None,
        base=base,
        vision=vision,
        forbidden=torch.tensor(media, device=place) if media else None,
    )


def context_length(config: Any, wanted: int | None) -> int:
    """Return the context length in tokens: `wanted`, at most what the model's text configuration allows; None: all of it."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return min(int(limit), wanted or int(limit)) if limit else wanted or CONTEXT


def check_vocabulary(text: Detokenizer | None, vocabulary: int, folder: Path) -> None:
    """Raise DataError if the tokenizer has tokens that are not in the model's vocabulary."""
    if text is not None and text.highest_token >= vocabulary:
        raise DataError(
            f"the tokenizer has a token {text.highest_token} ({text.token(text.highest_token)!r}), but the model's "
            f"vocabulary ends at {vocabulary - 1}",
            where=str(folder),
            fix="Save the tokenizer that belongs to the model, or resize the model's embeddings",
        )


def load_module(auto: Any, folder: Path, dtype: torch.dtype, *, trust_remote_code: bool, **options: Any) -> Any:
    """Load a module with `auto`, one of transformers' `Auto` classes. Raises DataError if it does not load completely."""
    transformers_logging.disable_progress_bar()
    try:
        module, report = auto.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (
        OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError, StrictDataclassError
    ) as error:  # fmt: skip
        # The text of a KeyError is only the key.
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        reason = " ".join(said.split())[:300]
        raise DataError(
            f"cannot load this model ({reason})", where=str(folder), fix="Check the folder's files"
        ) from error
    check_loaded(report["missing_keys"], folder)
    return module


def align_weights(module: Any) -> None:
    """Copy weights that are not aligned to `ALIGNMENT`: the speed and the last bits of a matrix product may depend on
    the address, and weights mapped from a file may have any.
    """
    for parameter in module.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def unservable_model(folder: Path, why: str) -> DataError:
    """Return the error for a model that loads but cannot be served."""
    return DataError(
        f"the torch engine cannot serve this model: {why}", where=str(folder), fix="Serve it with SGLang instead"
    )


class LoadedModel(Protocol):
    """A generating or classifying model in memory.

    `folder`: from which it was loaded. `asleep`: whether its weights are released.
    """

    module: Any
    folder: Path
    base: BaseFiles | None
    asleep: bool

    @property
    def shape(self) -> CacheShape:
        """Dtype and device of the weights; layers only if the model has a KV cache."""
        ...


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """New weights in host memory that were checked to fit the model, by the module's parameter names. `adapter`: of the
    policy at run time, instead of weights."""

    tensors: Mapping[str, torch.Tensor]
    adapter: AdapterMatrices | None = None


def check_awake(model: LoadedModel) -> None:
    """Raise EngineError while the model's weights are released, and can neither be read nor written."""
    if model.asleep:
        raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")


def stage_weights(model: LoadedModel, folder: Path) -> StagedWeights:
    """Load a folder's weights into host memory and check them, in any thread. Raises EngineError if they do not fit.

    All names and shapes are checked here, so that `apply_weights` changes all weights or none. A folder with other
    names than the module (older checkpoints, fused experts) is loaded through transformers, which can convert them. A
    folder with adapters is added to the model's own folder, whatever is served now.
    """
    check_awake(model)
    own: dict[str, torch.Tensor] = model.module.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    try:
        files = sorted(folder.glob("*.safetensors"))
        adapts = (folder / ADAPTER_FILE).is_file()
        if adapts:
            # The base's files may have more tensors than the module, such as tables of positions.
            adapted = adapted_tensors(model.folder, folder, model.base)
            tensors.update((one.name, one.tensor) for one in adapted if one.name in own)
        for file in () if adapts else files:
            with safe_open(file, framework="pt") as weights:
                tensors.update({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
        if adapts and _missing(own, tensors):
            # Layers without an adapter, such as fused experts, may have other names in the base's files.
            tensors = {**_converted(model, model.folder), **tensors}
        elif tensors.keys() - own.keys():
            tensors = dict(_converted(model, folder))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError(
            f"cannot read the weights ({one_line(error)})",
            where=str(folder),
            fix="Repeat the weight sync",
        ) from error
    if not files:
        raise EngineError(
            "the folder has no weights (*.safetensors)", where=str(folder), fix="Provide a complete model folder"
        )
    left_out = _frozen_names(folder)
    check_fit(own, tensors, folder, optional=(own.keys() - set(_missing(own, tensors))) | left_out)
    return StagedWeights(tensors)


def _frozen_names(folder: Path) -> Set[str]:
    """The parameters that the folder lacks because training does not change them. Raises EngineError."""
    try:
        return frozenset(json.loads((folder / FROZEN_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"cannot read {FROZEN_FILE} ({one_line(error)})", where=str(folder)) from error


def _missing(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names in `own` that `tensors` lacks. A checkpoint contains tied weights once."""
    written = {own[name].data_ptr() for name in tensors if name in own}
    return sorted(name for name in own.keys() - tensors.keys() if own[name].data_ptr() not in written)


def _converted(model: LoadedModel, folder: Path) -> Mapping[str, torch.Tensor]:
    # The class that already serves, which may come with the model.
    module, report = type(model.module).from_pretrained(
        folder,
        config=model.module.config,
        dtype=model.shape.dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers initialises these at random and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the checkpoint lacks {missing[0]} and has {sorted(report['unexpected_keys'])[:1]}")
    state: dict[str, torch.Tensor] = module.state_dict()
    return state


def apply_weights(model: LoadedModel, staged: StagedWeights) -> None:
    """Copy staged weights into the model's parameters."""
    own: dict[str, torch.Tensor] = model.module.state_dict()
    with torch.no_grad():
        for name, tensor in staged.tensors.items():
            own[name].copy_(tensor)


class WeightOffloader:
    """Releases the memory of a model's weights, and restores them bit for bit.

    Weights of a GPU are moved to host memory, those of a CPU to a file in the system's temporary folder (`TMPDIR`). The
    file has no name, so none is left behind however the process ends.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._file: IO[bytes] | None = None
        self._shapes: list[torch.Size] = []

    def offload(self) -> None:
        """Release the weights' memory. Raises EngineError if the file cannot be written; then nothing has changed."""
        model = self._model
        if model.shape.device.type != "cpu":
            model.module.to("cpu")
            torch.cuda.empty_cache()
        else:
            self._spill()
            release_free_memory()
        model.asleep = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        # Tied weights once.
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
                f"cannot write the released weights to a file ({error.strerror or error})",
                where=tempfile.gettempdir(),
                fix="Free space there, or set TMPDIR to another folder",
            ) from error
        self._shapes = [parameter.shape for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._file = file

    def reload(self) -> None:
        """Restore the weights."""
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


HOST_SHARE = 0.25
DEVICE_SHARE = 0.8

SMALLEST = 4096
"""Minimum size in tokens of a KV cache if the launch sets none."""

UNMEASURED_BYTES_PER_TOKEN = 256 * 1024
"""Assumed bytes per token of the KV cache if the layers were not measured (`GenericRunner`): about those of a model
with 7B parameters.
"""

MEMORY_FIX = (
    "Lower rollout.cache_tokens (what the cache holds), rollout.batch_slots (sequences at once) or "
    "rollout.prefill_chunk_tokens (prompt tokens at once)"
)

UNKNOWN_HOST_BYTES = 2**32
"""Assumed free memory of a system other than Linux."""


def default_cache_tokens(shape: CacheShape, free_bytes: int) -> int:
    """Return how many tokens the KV cache may hold if the launch sets no `cache_tokens`.

    `free_bytes`: free memory after the model was loaded. The cache may use `HOST_SHARE` of it on a host, which other
    engines, ranks and daemons share, and `DEVICE_SHARE` on a GPU. Nothing is reserved: the cache allocates memory as it
    fills.
    """
    share = HOST_SHARE if shape.device.type == "cpu" else DEVICE_SHARE
    return max(SMALLEST, int(share * free_bytes) // (shape.bytes_per_token or UNMEASURED_BYTES_PER_TOKEN))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes; for a CPU see `free_host_bytes`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes(Path("/"))


def free_host_bytes(root: Path) -> int:
    """Return the free memory of the host, or of the process's control group if it has less, in bytes.

    `root`: folder that contains `proc` and `sys`.
    """
    try:
        return host_memory(root / "proc/meminfo", root / "sys/fs/cgroup").available
    except (OSError, ValueError):
        return UNKNOWN_HOST_BYTES


@contextmanager
def explain_memory_error(when: str, fix: str = MEMORY_FIX) -> Iterator[None]:
    """Turn an out-of-memory error in the block into an EngineError. `when`: what was going on. `fix`: what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"the engine ran out of memory {when} ({reason})", fix=fix) from error


TOO_BIG = "Serve a smaller model, free memory on this machine, or set dtype bfloat16"


def device_of(launch: EngineLaunch | DiffusersLaunch) -> str:
    """Return the device on which the model runs. Raises UsageError if it does not exist."""
    device = launch.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {device!r} is not available", where="--device", fix="Use --device cpu")
    return device
