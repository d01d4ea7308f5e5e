"""The kept samples of a job, read from its run's folder for whoever asks. Any controller can: they all see the folder.

What a stream holds of a step is where its groups lie; a group's texts are read when it is that group's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controllers.service.refusals import bad_field
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.reading import SamplesSpec
from gcore.errors import GcoreError
from gcore.ledger.mirror import JobMirror
from gcore.samples import folder
from gcore.samples.records import KeptGroup, KeptText
from gcore.samples.selection import Order, Response, Selection, find_kept, find_version, responses_of, select, standing
from gcore.schema import UnreadableRecord
from gcore.types import Version

_ORDERS: dict[int, Order] = {
    pb.SAMPLE_ORDER_UNSPECIFIED: "stream",
    pb.SAMPLE_ORDER_BEST: "best",
    pb.SAMPLE_ORDER_WORST: "worst",
}
_STANDINGS = {
    "committed": pb.STEP_STANDING_COMMITTED,
    "under way": pb.STEP_STANDING_UNDER_WAY,
    "cut off": pb.STEP_STANDING_CUT_OFF,
}


async def find_samples(mirror: JobMirror, request: pb.GetSamplesRequest) -> Iterator[pb.SampleGroup]:
    """The groups that fit the request, each read when it is asked for, which blocks. Raises BadFields, NoSamples, and GcoreError if the
    folder cannot be read, now or then."""
    assert mirror.job is not None
    job = mirror.job.record
    run_dir, head = Path(job.run_dir), mirror.head.record if mirror.head else None
    spec = SamplesSpec.model_validate(job.spec.get("samples", {}))
    ended = mirror.status is not None and mirror.status.record.phase.ended

    def find(kept: Sequence[Version], step: int | None) -> Version:
        return find_version(kept, head, spec, step, ended=ended)

    picked = await asyncio.to_thread(_pick, run_dir, request, find)
    return _messages(picked, _STANDINGS[standing(head, picked.version)] if head is not None else None)


def samples_of_folder(run_dir: Path, request: pb.GetSamplesRequest) -> Iterator[pb.SampleGroup]:
    """The same of a run of which no cluster knows any more; how its steps stood is not said. Blocks on the disk."""
    return _messages(_pick(run_dir, request, find_kept), None)


@dataclass(frozen=True, slots=True)
class _Picked:
    """What a request asks for: where it lies, and no more of it than that. `advantages`: by the group's digest, as written."""

    version: Version
    selection: Selection[folder.GroupLine]
    advantages: Mapping[str, Sequence[bytes]]
    order: Order


def _pick(
    run_dir: Path, request: pb.GetSamplesRequest, find: Callable[[Sequence[Version], int | None], Version]
) -> _Picked:
    order = _order(request)
    with _reading(run_dir):
        version = find(folder.kept_steps(run_dir), request.step if request.HasField("step") else None)
        groups = folder.list_groups(run_dir, version)
        selection = select(groups, source=request.source, order=order, limit=request.limit)
        known, wanted = folder.list_advantages(run_dir, version), {group.digest for group in selection.groups}
    return _Picked(version, selection, {name: lines for name, lines in known.items() if name in wanted}, order)


def _order(request: pb.GetSamplesRequest) -> Order:
    if request.order not in _ORDERS:
        raise bad_field("order", f"{request.order} is no order", f"Use {', '.join(pb.SampleOrder.keys())}")
    return _ORDERS[request.order]


def _messages(picked: _Picked, stands: pb.StepStanding | None) -> Iterator[pb.SampleGroup]:
    for where in picked.selection.groups:
        with _reading(where.file.parent):
            group = folder.read_group(where)
        advantages = folder.advantages_in(picked.advantages.get(where.digest, ()))
        message = _group(group, responses_of(group, advantages, picked.order))
        message.lineage, message.step, message.of = picked.version.lineage, picked.version.step, picked.selection.of
        if stands is not None:
            message.standing = stands
        yield message


@contextlib.contextmanager
def _reading(where: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, UnreadableRecord) as error:
        raise GcoreError("the samples of this step were removed while they were read", where=str(where)) from error
    except OSError as error:
        raise GcoreError(f"the run's folder cannot be read ({error.strerror or error})", where=str(where)) from error


def _group(group: KeptGroup, responses: tuple[Response, ...]) -> pb.SampleGroup:
    return pb.SampleGroup(
        ref=str(group.ref),
        digest=group.digest,
        source=group.source,
        holder=group.holder,
        prompt=_text(group.prompt),
        prompt_tokens=group.prompt_tokens,
        answer=group.answer,
        temperature=group.temperature,
        responses=[_response(one) for one in responses],
    )


def _response(one: Response) -> pb.SampleResponse:
    sample, advantage = one.sample, one.advantage
    message = pb.SampleResponse(
        index=one.index,
        text=_text(sample.response),
        tokens=sample.tokens,
        reward=sample.reward,
        parts=[pb.RewardPart(name=name, value=value) for name, value in sample.parts],
        finish_reason=sample.finish_reason,
        masked=sample.masked,
        versions=sample.versions,
        observed=[pb.ObservedText(start=start, end=end) for start, end in sample.observed],
        observed_tokens=sample.observed_tokens,
    )
    if advantage is not None:
        message.advantage = advantage.mean
        if advantage.least is not None and advantage.most is not None:
            message.advantage_least, message.advantage_most = advantage.least, advantage.most
    return message


def _text(text: KeptText) -> pb.SampleText:
    return pb.SampleText(text=text.text, more=text.more)
