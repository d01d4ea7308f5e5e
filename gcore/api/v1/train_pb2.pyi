from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorldId(_message.Message):
    __slots__ = ("job_uid", "world", "lineage")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    world: str
    lineage: int
    def __init__(self, job_uid: _Optional[str] = ..., world: _Optional[str] = ..., lineage: _Optional[int] = ...) -> None: ...

class StepToken(_message.Message):
    __slots__ = ("lineage", "step", "attempt")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    attempt: int
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class PromptRef(_message.Message):
    __slots__ = ("data_epoch", "shard", "seq")
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    data_epoch: int
    shard: int
    seq: int
    def __init__(self, data_epoch: _Optional[int] = ..., shard: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class FeedHeader(_message.Message):
    __slots__ = ("schema_version", "world", "token", "sender", "total_bytes", "sha256", "share")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    world: WorldId
    token: StepToken
    sender: str
    total_bytes: int
    sha256: bytes
    share: int
    def __init__(self, schema_version: _Optional[int] = ..., world: _Optional[_Union[WorldId, _Mapping]] = ..., token: _Optional[_Union[StepToken, _Mapping]] = ..., sender: _Optional[str] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., share: _Optional[int] = ...) -> None: ...

class FeedChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: FeedHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[FeedHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FeedPayload(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupPart]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupPart, _Mapping]]] = ...) -> None: ...

class GroupPart(_message.Message):
    __slots__ = ("ref", "digest", "prompt_ids", "sample_digests", "samples", "temperature", "baseline", "media", "holders")
    REF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ref: PromptRef
    digest: str
    prompt_ids: bytes
    sample_digests: _containers.RepeatedScalarFieldContainer[bytes]
    samples: _containers.RepeatedCompositeFieldContainer[SamplePart]
    temperature: float
    baseline: float
    media: _containers.RepeatedCompositeFieldContainer[Medium]
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ref: _Optional[_Union[PromptRef, _Mapping]] = ..., digest: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., sample_digests: _Optional[_Iterable[bytes]] = ..., samples: _Optional[_Iterable[_Union[SamplePart, _Mapping]]] = ..., temperature: _Optional[float] = ..., baseline: _Optional[float] = ..., media: _Optional[_Iterable[_Union[Medium, _Mapping]]] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class Medium(_message.Message):
    __slots__ = ("kind", "sha256", "size", "shape", "dtype")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    sha256: bytes
    size: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, kind: _Optional[str] = ..., sha256: _Optional[bytes] = ..., size: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class SamplePart(_message.Message):
    __slots__ = ("index", "token_ids", "logprobs", "reward", "finish_reason", "masked", "observed", "media", "steps", "sigmas")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: bytes
    logprobs: bytes
    reward: float
    finish_reason: str
    masked: bool
    observed: bytes
    media: _containers.RepeatedCompositeFieldContainer[Medium]
    steps: bytes
    sigmas: bytes
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., reward: _Optional[float] = ..., finish_reason: _Optional[str] = ..., masked: _Optional[bool] = ..., observed: _Optional[bytes] = ..., media: _Optional[_Iterable[_Union[Medium, _Mapping]]] = ..., steps: _Optional[bytes] = ..., sigmas: _Optional[bytes] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("held", "fetching")
    HELD_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldGroup]
    fetching: _containers.RepeatedCompositeFieldContainer[FetchingGroup]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldGroup, _Mapping]]] = ..., fetching: _Optional[_Iterable[_Union[FetchingGroup, _Mapping]]] = ...) -> None: ...

class HeldGroup(_message.Message):
    __slots__ = ("digest", "samples")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[str] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchingGroup(_message.Message):
    __slots__ = ("digest", "samples", "total", "fetched", "unavailable")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    samples: _containers.RepeatedScalarFieldContainer[int]
    total: int
    fetched: int
    unavailable: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digest: _Optional[str] = ..., samples: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ..., fetched: _Optional[int] = ..., unavailable: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("schema_version", "world", "token", "seal")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    world: WorldId
    token: StepToken
    seal: bytes
    def __init__(self, schema_version: _Optional[int] = ..., world: _Optional[_Union[WorldId, _Mapping]] = ..., token: _Optional[_Union[StepToken, _Mapping]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class ApplyReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("world", "step", "what")
    WORLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    world: WorldId
    step: int
    what: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, world: _Optional[_Union[WorldId, _Mapping]] = ..., step: _Optional[int] = ..., what: _Optional[_Iterable[str]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("world",)
    WORLD_FIELD_NUMBER: _ClassVar[int]
    world: WorldId
    def __init__(self, world: _Optional[_Union[WorldId, _Mapping]] = ...) -> None: ...

class RestReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, released: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("world",)
    WORLD_FIELD_NUMBER: _ClassVar[int]
    world: WorldId
    def __init__(self, world: _Optional[_Union[WorldId, _Mapping]] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("schema_version", "world", "rank", "world_size", "holding", "held", "applied", "report", "phase", "progress", "error", "saved", "writing", "streaming", "begun", "begun_sha256", "trouble", "released", "clock", "phase_seconds", "fetching", "fetched_bytes")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BEGUN_SHA256_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    world: WorldId
    rank: int
    world_size: int
    holding: StepToken
    held: _containers.RepeatedCompositeFieldContainer[HeldGroup]
    applied: StepToken
    report: StepReport
    phase: str
    progress: int
    error: str
    saved: SavedCheckpoint
    writing: CheckpointWrite
    streaming: StepToken
    begun: int
    begun_sha256: bytes
    trouble: str
    released: _containers.RepeatedScalarFieldContainer[str]
    clock: float
    phase_seconds: _containers.ScalarMap[str, float]
    fetching: _containers.RepeatedCompositeFieldContainer[FetchingGroup]
    fetched_bytes: int
    def __init__(self, schema_version: _Optional[int] = ..., world: _Optional[_Union[WorldId, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., holding: _Optional[_Union[StepToken, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldGroup, _Mapping]]] = ..., applied: _Optional[_Union[StepToken, _Mapping]] = ..., report: _Optional[_Union[StepReport, _Mapping]] = ..., phase: _Optional[str] = ..., progress: _Optional[int] = ..., error: _Optional[str] = ..., saved: _Optional[_Union[SavedCheckpoint, _Mapping]] = ..., writing: _Optional[_Union[CheckpointWrite, _Mapping]] = ..., streaming: _Optional[_Union[StepToken, _Mapping]] = ..., begun: _Optional[int] = ..., begun_sha256: _Optional[bytes] = ..., trouble: _Optional[str] = ..., released: _Optional[_Iterable[str]] = ..., clock: _Optional[float] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., fetching: _Optional[_Iterable[_Union[FetchingGroup, _Mapping]]] = ..., fetched_bytes: _Optional[int] = ...) -> None: ...

class SavedCheckpoint(_message.Message):
    __slots__ = ("lineage", "step", "file", "sha256")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    file: str
    sha256: str
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., file: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class CheckpointWrite(_message.Message):
    __slots__ = ("lineage", "step", "total", "written", "error", "over")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    total: int
    written: int
    error: str
    over: bool
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., total: _Optional[int] = ..., written: _Optional[int] = ..., error: _Optional[str] = ..., over: _Optional[bool] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("content_sha256", "metrics", "weights_file", "checkpoint_file", "checkpoint_sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CONTENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FILE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FILE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    content_sha256: bytes
    metrics: _containers.ScalarMap[str, float]
    weights_file: str
    checkpoint_file: str
    checkpoint_sha256: str
    def __init__(self, content_sha256: _Optional[bytes] = ..., metrics: _Optional[_Mapping[str, float]] = ..., weights_file: _Optional[str] = ..., checkpoint_file: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ...) -> None: ...
