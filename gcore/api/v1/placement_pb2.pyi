from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadsRequest(_message.Message):
    __slots__ = ("job_uid",)
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    def __init__(self, job_uid: _Optional[str] = ...) -> None: ...

class LoadsReply(_message.Message):
    __slots__ = ("engines", "unseated", "change_s", "left_tokens", "foreseen")
    class UnseatedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    UNSEATED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORESEEN_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    unseated: _containers.ScalarMap[str, int]
    change_s: float
    left_tokens: float
    foreseen: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., unseated: _Optional[_Mapping[str, int]] = ..., change_s: _Optional[float] = ..., left_tokens: _Optional[float] = ..., foreseen: _Optional[int] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("node", "slot", "judge", "running", "waiting", "ready", "asleep")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: str
    judge: str
    running: int
    waiting: int
    ready: bool
    asleep: bool
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[str] = ..., judge: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., ready: _Optional[bool] = ..., asleep: _Optional[bool] = ...) -> None: ...
