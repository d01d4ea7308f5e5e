from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_PENDING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_PAUSED: _ClassVar[JobState]

class StartMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START_MODE_UNSPECIFIED: _ClassVar[StartMode]
    START_MODE_RESUME: _ClassVar[StartMode]
    START_MODE_NEW: _ClassVar[StartMode]

class LogMark(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_MARK_UNSPECIFIED: _ClassVar[LogMark]
    LOG_MARK_BEGIN: _ClassVar[LogMark]
    LOG_MARK_END: _ClassVar[LogMark]

class CancelMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_MODE_UNSPECIFIED: _ClassVar[CancelMode]
    CANCEL_MODE_NOW: _ClassVar[CancelMode]
    CANCEL_MODE_DRAIN: _ClassVar[CancelMode]

class SampleOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_ORDER_UNSPECIFIED: _ClassVar[SampleOrder]
    SAMPLE_ORDER_BEST: _ClassVar[SampleOrder]
    SAMPLE_ORDER_WORST: _ClassVar[SampleOrder]

class StepStanding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STANDING_UNSPECIFIED: _ClassVar[StepStanding]
    STEP_STANDING_COMMITTED: _ClassVar[StepStanding]
    STEP_STANDING_UNDER_WAY: _ClassVar[StepStanding]
    STEP_STANDING_CUT_OFF: _ClassVar[StepStanding]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_PENDING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_PAUSED: JobState
START_MODE_UNSPECIFIED: StartMode
START_MODE_RESUME: StartMode
START_MODE_NEW: StartMode
LOG_MARK_UNSPECIFIED: LogMark
LOG_MARK_BEGIN: LogMark
LOG_MARK_END: LogMark
CANCEL_MODE_UNSPECIFIED: CancelMode
CANCEL_MODE_NOW: CancelMode
CANCEL_MODE_DRAIN: CancelMode
SAMPLE_ORDER_UNSPECIFIED: SampleOrder
SAMPLE_ORDER_BEST: SampleOrder
SAMPLE_ORDER_WORST: SampleOrder
STEP_STANDING_UNSPECIFIED: StepStanding
STEP_STANDING_COMMITTED: StepStanding
STEP_STANDING_UNDER_WAY: StepStanding
STEP_STANDING_CUT_OFF: StepStanding

class Job(_message.Message):
    __slots__ = ("uid", "name", "state", "reason", "spec_json", "run_dir", "created", "step", "steps", "lineage", "shares", "waiting", "checkpoint", "ended", "sources", "best", "warnings", "rollback", "namespace", "priority", "owner", "queue_position", "slots", "slots_min", "slots_max")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MIN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    state: JobState
    reason: str
    spec_json: str
    run_dir: str
    created: float
    step: int
    steps: int
    lineage: int
    shares: _containers.RepeatedCompositeFieldContainer[ShardShare]
    waiting: _containers.RepeatedCompositeFieldContainer[Waiting]
    checkpoint: str
    ended: float
    sources: _containers.RepeatedCompositeFieldContainer[SourceReport]
    best: BestCheckpoint
    warnings: _containers.RepeatedCompositeFieldContainer[JobWarning]
    rollback: LastRollback
    namespace: str
    priority: int
    owner: str
    queue_position: int
    slots: int
    slots_min: int
    slots_max: int
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., spec_json: _Optional[str] = ..., run_dir: _Optional[str] = ..., created: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., lineage: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[ShardShare, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[Waiting, _Mapping]]] = ..., checkpoint: _Optional[str] = ..., ended: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[SourceReport, _Mapping]]] = ..., best: _Optional[_Union[BestCheckpoint, _Mapping]] = ..., warnings: _Optional[_Iterable[_Union[JobWarning, _Mapping]]] = ..., rollback: _Optional[_Union[LastRollback, _Mapping]] = ..., namespace: _Optional[str] = ..., priority: _Optional[int] = ..., owner: _Optional[str] = ..., queue_position: _Optional[int] = ..., slots: _Optional[int] = ..., slots_min: _Optional[int] = ..., slots_max: _Optional[int] = ...) -> None: ...

class JobWarning(_message.Message):
    __slots__ = ("topic", "node", "sentence", "time")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    node: str
    sentence: str
    time: float
    def __init__(self, topic: _Optional[str] = ..., node: _Optional[str] = ..., sentence: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...

class LastRollback(_message.Message):
    __slots__ = ("step", "lineage", "reason")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    step: int
    lineage: int
    reason: str
    def __init__(self, step: _Optional[int] = ..., lineage: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class BestCheckpoint(_message.Message):
    __slots__ = ("step", "lineage", "metric", "value", "checkpoint")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    step: int
    lineage: int
    metric: str
    value: float
    checkpoint: str
    def __init__(self, step: _Optional[int] = ..., lineage: _Optional[int] = ..., metric: _Optional[str] = ..., value: _Optional[float] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class SourceReport(_message.Message):
    __slots__ = ("name", "trained", "filtered", "failed", "mean_reward", "mean_length", "truncated", "accuracy", "metrics", "eval_samples", "eval_unscored")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MEAN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVAL_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    name: str
    trained: int
    filtered: int
    failed: int
    mean_reward: float
    mean_length: float
    truncated: float
    accuracy: float
    metrics: _containers.ScalarMap[str, float]
    eval_samples: int
    eval_unscored: int
    def __init__(self, name: _Optional[str] = ..., trained: _Optional[int] = ..., filtered: _Optional[int] = ..., failed: _Optional[int] = ..., mean_reward: _Optional[float] = ..., mean_length: _Optional[float] = ..., truncated: _Optional[float] = ..., accuracy: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., eval_samples: _Optional[int] = ..., eval_unscored: _Optional[int] = ...) -> None: ...

class ShardShare(_message.Message):
    __slots__ = ("node", "incarnation", "shards")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("who", "what", "since", "cause")
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    who: str
    what: str
    since: float
    cause: str
    def __init__(self, who: _Optional[str] = ..., what: _Optional[str] = ..., since: _Optional[float] = ..., cause: _Optional[str] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("request_id", "spec_json", "mode", "owner_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OWNER_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec_json: str
    mode: StartMode
    owner_key: str
    def __init__(self, request_id: _Optional[str] = ..., spec_json: _Optional[str] = ..., mode: _Optional[_Union[StartMode, str]] = ..., owner_key: _Optional[str] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "namespace", "states", "name_prefix")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    namespace: str
    states: _containers.RepeatedScalarFieldContainer[JobState]
    name_prefix: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., namespace: _Optional[str] = ..., states: _Optional[_Iterable[_Union[JobState, str]]] = ..., name_prefix: _Optional[str] = ...) -> None: ...

class ListJobsReply(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class StreamLogsRequest(_message.Message):
    __slots__ = ("job", "role", "rank", "node", "instance", "since", "previous", "follow", "tail", "places", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    role: str
    rank: int
    node: str
    instance: str
    since: float
    previous: bool
    follow: bool
    tail: int
    places: bool
    after: _containers.RepeatedCompositeFieldContainer[LogPlace]
    def __init__(self, job: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., node: _Optional[str] = ..., instance: _Optional[str] = ..., since: _Optional[float] = ..., previous: _Optional[bool] = ..., follow: _Optional[bool] = ..., tail: _Optional[int] = ..., places: _Optional[bool] = ..., after: _Optional[_Iterable[_Union[LogPlace, _Mapping]]] = ...) -> None: ...

class LogPlace(_message.Message):
    __slots__ = ("instance", "offset", "beginning", "within", "time")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    instance: str
    offset: int
    beginning: int
    within: bool
    time: float
    def __init__(self, instance: _Optional[str] = ..., offset: _Optional[int] = ..., beginning: _Optional[int] = ..., within: _Optional[bool] = ..., time: _Optional[float] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("instance", "node", "role", "rank", "text", "time", "place", "mark")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    instance: str
    node: str
    role: str
    rank: int
    text: str
    time: float
    place: LogPlace
    mark: LogMark
    def __init__(self, instance: _Optional[str] = ..., node: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., text: _Optional[str] = ..., time: _Optional[float] = ..., place: _Optional[_Union[LogPlace, _Mapping]] = ..., mark: _Optional[_Union[LogMark, str]] = ...) -> None: ...

class StreamMetricsRequest(_message.Message):
    __slots__ = ("job", "after_step", "follow", "names", "after_lineage")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    AFTER_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    after_step: int
    follow: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    after_lineage: int
    def __init__(self, job: _Optional[str] = ..., after_step: _Optional[int] = ..., follow: _Optional[bool] = ..., names: _Optional[_Iterable[str]] = ..., after_lineage: _Optional[int] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("lineage", "step", "time", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    time: float
    values: _containers.ScalarMap[str, float]
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., time: _Optional[float] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class UpdateJobRequest(_message.Message):
    __slots__ = ("job", "update_mask", "priority", "slots_min", "slots_max")
    JOB_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MIN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    job: str
    update_mask: _field_mask_pb2.FieldMask
    priority: int
    slots_min: int
    slots_max: int
    def __init__(self, job: _Optional[str] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., priority: _Optional[int] = ..., slots_min: _Optional[int] = ..., slots_max: _Optional[int] = ...) -> None: ...

class PauseJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ResumeJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job", "after", "once", "newest")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    job: str
    after: int
    once: bool
    newest: int
    def __init__(self, job: _Optional[str] = ..., after: _Optional[int] = ..., once: _Optional[bool] = ..., newest: _Optional[int] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("sequence", "time", "kind", "message", "data_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: float
    kind: str
    message: str
    data_json: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job", "mode")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    job: str
    mode: CancelMode
    def __init__(self, job: _Optional[str] = ..., mode: _Optional[_Union[CancelMode, str]] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job", "files")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    job: str
    files: bool
    def __init__(self, job: _Optional[str] = ..., files: _Optional[bool] = ...) -> None: ...

class DeleteJobReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunEvalRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class RunEvalReply(_message.Message):
    __slots__ = ("step", "lineage")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    lineage: int
    def __init__(self, step: _Optional[int] = ..., lineage: _Optional[int] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListShardsReply(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("shard", "node", "incarnation", "data_epoch", "seq", "length", "ahead")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    shard: int
    node: str
    incarnation: str
    data_epoch: int
    seq: int
    length: int
    ahead: int
    def __init__(self, shard: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., data_epoch: _Optional[int] = ..., seq: _Optional[int] = ..., length: _Optional[int] = ..., ahead: _Optional[int] = ...) -> None: ...

class AuditJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class AuditReport(_message.Message):
    __slots__ = ("clean", "violations", "steps", "trained", "filtered", "failed", "in_flight", "groups_by_node", "lineages", "issued", "epochs", "findings")
    class GroupsByNodeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_BY_NODE_FIELD_NUMBER: _ClassVar[int]
    LINEAGES_FIELD_NUMBER: _ClassVar[int]
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    clean: bool
    violations: _containers.RepeatedScalarFieldContainer[str]
    steps: int
    trained: int
    filtered: int
    failed: int
    in_flight: int
    groups_by_node: _containers.ScalarMap[str, int]
    lineages: int
    issued: int
    epochs: int
    findings: _containers.RepeatedCompositeFieldContainer[AuditFinding]
    def __init__(self, clean: _Optional[bool] = ..., violations: _Optional[_Iterable[str]] = ..., steps: _Optional[int] = ..., trained: _Optional[int] = ..., filtered: _Optional[int] = ..., failed: _Optional[int] = ..., in_flight: _Optional[int] = ..., groups_by_node: _Optional[_Mapping[str, int]] = ..., lineages: _Optional[int] = ..., issued: _Optional[int] = ..., epochs: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[AuditFinding, _Mapping]]] = ...) -> None: ...

class AuditFinding(_message.Message):
    __slots__ = ("kind", "sentence", "refs")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    sentence: str
    refs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., sentence: _Optional[str] = ..., refs: _Optional[_Iterable[str]] = ...) -> None: ...

class GetBooksRequest(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class BookOfNode(_message.Message):
    __slots__ = ("node", "lineage", "step", "book_json")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BOOK_JSON_FIELD_NUMBER: _ClassVar[int]
    node: str
    lineage: int
    step: int
    book_json: str
    def __init__(self, node: _Optional[str] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., book_json: _Optional[str] = ...) -> None: ...

class GetSamplesRequest(_message.Message):
    __slots__ = ("job", "step", "source", "order", "limit")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    source: str
    order: SampleOrder
    limit: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., source: _Optional[str] = ..., order: _Optional[_Union[SampleOrder, str]] = ..., limit: _Optional[int] = ...) -> None: ...

class SampleGroup(_message.Message):
    __slots__ = ("lineage", "step", "standing", "of", "ref", "digest", "source", "holder", "prompt", "prompt_tokens", "answer", "temperature", "responses", "pictures")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    standing: StepStanding
    of: int
    ref: str
    digest: str
    source: str
    holder: str
    prompt: SampleText
    prompt_tokens: int
    answer: str
    temperature: float
    responses: _containers.RepeatedCompositeFieldContainer[SampleResponse]
    pictures: _containers.RepeatedCompositeFieldContainer[SamplePicture]
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., standing: _Optional[_Union[StepStanding, str]] = ..., of: _Optional[int] = ..., ref: _Optional[str] = ..., digest: _Optional[str] = ..., source: _Optional[str] = ..., holder: _Optional[str] = ..., prompt: _Optional[_Union[SampleText, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., answer: _Optional[str] = ..., temperature: _Optional[float] = ..., responses: _Optional[_Iterable[_Union[SampleResponse, _Mapping]]] = ..., pictures: _Optional[_Iterable[_Union[SamplePicture, _Mapping]]] = ...) -> None: ...

class SamplePicture(_message.Message):
    __slots__ = ("sha256", "bytes", "height", "width", "file")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    bytes: int
    height: int
    width: int
    file: str
    def __init__(self, sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., file: _Optional[str] = ...) -> None: ...

class SampleText(_message.Message):
    __slots__ = ("text", "more")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    text: str
    more: int
    def __init__(self, text: _Optional[str] = ..., more: _Optional[int] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("index", "text", "tokens", "reward", "parts", "advantage", "advantage_least", "advantage_most", "finish_reason", "masked", "versions", "observed", "observed_tokens", "pictures", "picture", "steps")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_LEAST_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_MOST_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: SampleText
    tokens: int
    reward: float
    parts: _containers.RepeatedCompositeFieldContainer[RewardPart]
    advantage: float
    advantage_least: float
    advantage_most: float
    finish_reason: str
    masked: bool
    versions: _containers.RepeatedScalarFieldContainer[str]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedText]
    observed_tokens: int
    pictures: _containers.RepeatedCompositeFieldContainer[SamplePicture]
    picture: SamplePicture
    steps: int
    def __init__(self, index: _Optional[int] = ..., text: _Optional[_Union[SampleText, _Mapping]] = ..., tokens: _Optional[int] = ..., reward: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[RewardPart, _Mapping]]] = ..., advantage: _Optional[float] = ..., advantage_least: _Optional[float] = ..., advantage_most: _Optional[float] = ..., finish_reason: _Optional[str] = ..., masked: _Optional[bool] = ..., versions: _Optional[_Iterable[str]] = ..., observed: _Optional[_Iterable[_Union[ObservedText, _Mapping]]] = ..., observed_tokens: _Optional[int] = ..., pictures: _Optional[_Iterable[_Union[SamplePicture, _Mapping]]] = ..., picture: _Optional[_Union[SamplePicture, _Mapping]] = ..., steps: _Optional[int] = ...) -> None: ...

class ObservedText(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RewardPart(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListCheckpointsReply(_message.Message):
    __slots__ = ("uid", "name", "checkpoints")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("step", "lineage", "folder", "bytes", "written", "kept", "problem", "nodes", "digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    lineage: int
    folder: str
    bytes: int
    written: float
    kept: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    def __init__(self, step: _Optional[int] = ..., lineage: _Optional[int] = ..., folder: _Optional[str] = ..., bytes: _Optional[int] = ..., written: _Optional[float] = ..., kept: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class PlacementReply(_message.Message):
    __slots__ = ("uid", "name", "policy", "dry_run", "lends", "step", "leader", "plan", "moves", "pin", "away", "folder")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    LENDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    policy: str
    dry_run: bool
    lends: bool
    step: int
    leader: str
    plan: bytes
    moves: bytes
    pin: bytes
    away: _containers.RepeatedScalarFieldContainer[str]
    folder: str
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., policy: _Optional[str] = ..., dry_run: _Optional[bool] = ..., lends: _Optional[bool] = ..., step: _Optional[int] = ..., leader: _Optional[str] = ..., plan: _Optional[bytes] = ..., moves: _Optional[bytes] = ..., pin: _Optional[bytes] = ..., away: _Optional[_Iterable[str]] = ..., folder: _Optional[str] = ...) -> None: ...

class PinPlacementRequest(_message.Message):
    __slots__ = ("job", "freeze", "rollout", "reward", "train", "release")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    job: str
    freeze: bool
    rollout: int
    reward: int
    train: int
    release: bool
    def __init__(self, job: _Optional[str] = ..., freeze: _Optional[bool] = ..., rollout: _Optional[int] = ..., reward: _Optional[int] = ..., train: _Optional[int] = ..., release: _Optional[bool] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes", "workers")
    NODES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "incarnation", "address", "pid", "slots", "draining", "sick", "uses")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SICK_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    address: str
    pid: int
    slots: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    sick: _containers.RepeatedScalarFieldContainer[str]
    uses: _containers.RepeatedCompositeFieldContainer[SlotUse]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., slots: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ..., sick: _Optional[_Iterable[str]] = ..., uses: _Optional[_Iterable[_Union[SlotUse, _Mapping]]] = ...) -> None: ...

class SlotUse(_message.Message):
    __slots__ = ("slot", "job_uid")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    slot: str
    job_uid: str
    def __init__(self, slot: _Optional[str] = ..., job_uid: _Optional[str] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "undo")
    NODE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    node: str
    undo: bool
    def __init__(self, node: _Optional[str] = ..., undo: _Optional[bool] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("since", "until", "by", "namespace")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    since: float
    until: float
    by: _containers.RepeatedScalarFieldContainer[str]
    namespace: str
    def __init__(self, since: _Optional[float] = ..., until: _Optional[float] = ..., by: _Optional[_Iterable[str]] = ..., namespace: _Optional[str] = ...) -> None: ...

class GetUsageReply(_message.Message):
    __slots__ = ("usages",)
    USAGES_FIELD_NUMBER: _ClassVar[int]
    usages: _containers.RepeatedCompositeFieldContainer[Usage]
    def __init__(self, usages: _Optional[_Iterable[_Union[Usage, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("by", "slot_seconds", "busy_seconds")
    class ByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BY_FIELD_NUMBER: _ClassVar[int]
    SLOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    by: _containers.ScalarMap[str, str]
    slot_seconds: float
    busy_seconds: float
    def __init__(self, by: _Optional[_Mapping[str, str]] = ..., slot_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("instance", "node", "role", "job_uid", "state", "address", "pid", "slot")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    instance: str
    node: str
    role: str
    job_uid: str
    state: str
    address: str
    pid: int
    slot: str
    def __init__(self, instance: _Optional[str] = ..., node: _Optional[str] = ..., role: _Optional[str] = ..., job_uid: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., slot: _Optional[str] = ...) -> None: ...

class GetQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("namespace", "slots")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    slots: int
    def __init__(self, namespace: _Optional[str] = ..., slots: _Optional[int] = ...) -> None: ...

class Quotas(_message.Message):
    __slots__ = ("quotas",)
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("namespace", "slots", "used", "jobs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    slots: int
    used: int
    jobs: int
    def __init__(self, namespace: _Optional[str] = ..., slots: _Optional[int] = ..., used: _Optional[int] = ..., jobs: _Optional[int] = ...) -> None: ...
