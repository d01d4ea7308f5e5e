"""The contract kit: checks for the tests of a plug-in that it works with gcore.

    from gcore.testing.contracts import check_filter, check_flow, check_reward

    async def test_my_flow():
        await check_flow("my_flow", entries=[{"prompt": "1+1=", "answer": "2"}])

    def test_my_reward():
        check_reward("my_reward", entries=[{"prompt": "1+1=", "answer": "2"}], right=["2"], wrong=["3"])

Each check loads the plug-in by its entry-point name, as a job does, runs it in memory, and raises `ContractBroken` with
a sentence that states the requirement and the observation. The checks do not test whether the plug-in is useful; write
tests of your own for that, and run it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore.config.base import Option
from gcore.config.load import find_flow, flow_settings
from gcore.config.reward import RewardSpec
from gcore.config.train import FilterSpec
from gcore.data.curriculum import CurriculumError, CurriculumView, SourceStatistics, find_curriculum
from gcore.errors import EngineUnreachable, GcoreError
from gcore.flows.filters import CheckedFilter, FilterError, find_filters, untrainable_reason
from gcore.plugins import plugin_trace
from gcore.reward.api import OpenReward, Response, RewardError, RewardResult, is_picture
from gcore.system.concurrency import limit_time
from gcore.testing.flows import AnswerScript, Asked, FakeCluster, group_of
from gcore.types import Group

Entries = Sequence[Mapping[str, Any]]

ODD_RESPONSES = ("", " ", "\n", "0", "-", "x" * 20_000, "9" * 20_000, "\u0663", "\x00", "\\boxed{", "((((", "🙂")
"""Responses that a model may generate."""

NO_SUCH_OPTION = "no_such_option"
"""Name of an option that no plug-in has. Each check tests that it is rejected."""

HANGS_S = 20.0
"""Seconds of real time after which `check_flow` reports that a flow hangs."""


class ContractBroken(AssertionError):
    """A plug-in violates a requirement of gcore."""


async def check_flow(
    name: str, entries: Entries, script: AnswerScript | None = None, *, peers: int = 2, **settings: Mapping[str, Any]
) -> FakeCluster:
    """Run a flow on `peers` peers to the end of its steps, and again with engines, rewards and filters that fail.

    `script` responds in place of an engine (default: right and wrong in turn). `settings` are sections of a spec.
    Returns the cluster of the run without failures, for further assertions. Raises ContractBroken, and what the flow
    raises.
    """
    flow = find_flow(name)
    for section in flow_settings(flow):
        _promise(
            section in ("flow", "rollout", "train", "reward", "checkpoint", "eval"),
            f"flow {name!r} sets section {section!r}, which a flow cannot set",
        )
    mine: dict[str, Mapping[str, Any]] = {**settings, "flow": {**settings.get("flow", {}), "name": name}}
    answers = script or alternate_answers
    quiet = FakeCluster(entries, answers, peers=peers, **mine)
    await _to_its_end(name, quiet)
    _check_steps(name, quiet)

    def unreliable(asked: Asked) -> str:
        if asked.tries == 0 and asked.prompt.ref.seq % 2 == 0:
            raise EngineUnreachable("simulated failure: no engine responds")
        return answers(asked)

    broken = FakeCluster(entries, unreliable, peers=peers, **mine)
    await _to_its_end(name, broken)
    _check_steps(name, broken)
    return quiet


def check_reward(
    name: str,
    entries: Entries,
    *,
    right: Sequence[str] = (),
    wrong: Sequence[str] = (),
    answer: str = "answer",
    options: Mapping[str, Option] | None = None,
) -> None:
    """Check a reward: it scores anything a model may generate, gives the same score twice, and rejects unknown options.

    `right[i]` and `wrong[i]` are responses to `entries[i]`; each right one must score higher than each wrong one. A reward
    of generated pictures gets `Response`s with a `picture_file`, and only these are scored. Raises ContractBroken,
    PluginFault.
    """
    spec = RewardSpec(name=name, answer=answer, options=dict(options or {}))
    reward = OpenReward.of(spec)
    values: dict[bool, list[float]] = {True: [], False: []}
    for good, responses in ((True, right), (False, wrong)):
        for entry, response in zip(itertools.cycle(entries), responses, strict=False):
            values[good].append(_scored(name, reward, response, entry).value)
    for best, worst in itertools.product(values[True], values[False]):
        _promise(best > worst, f"reward {name!r} gives {best} for a right response and {worst} for a wrong one")
    given = [one for one in (*right, *wrong) if is_picture(one)] or [Response(text) for text in ODD_RESPONSES]
    for entry in entries:
        for response in given:
            once, again = (_scored(name, reward, response, entry) for _ in range(2))
            _promise(once == again, f"reward {name!r} gives {once}, then {again}, for the same response and entry")
            _promise(math.isfinite(once.value), f"reward {name!r} is {once.value}")
    odd = spec.model_copy(update={"options": {**spec.options, NO_SUCH_OPTION: 1}})
    _refuses(
        f"reward {name!r} accepts an unknown option",
        lambda: OpenReward.of(odd)(given[-1], entries[0]),
        RewardError,
    )
    bare = {key: value for key, value in entries[0].items() if key != answer}
    if len(bare) < len(entries[0]):
        _says_so(f"reward {name!r} and an entry without {answer!r}", lambda: reward(given[0], bare), RewardError)


def check_filter(name: str, entries: Entries, *, options: Mapping[str, Option] | None = None) -> None:
    """Check a filter: it keeps a group or gives a reason, the same each time, and rejects unknown options.

    Raises ContractBroken, PluginFault.
    """
    found = find_filters([FilterSpec(name=name, options=dict(options or {}))])[0]
    for entry in entries:
        for rewards in ((0.0,), (1.0,), (0.0, 1.0), (1.0, 1.0, 1.0), (0.25, -3.0, 1e9)):
            group = group_of(rewards, str(entry.get("prompt", "")))
            once, again = (_kept(found, group, entry) for _ in range(2))
            _promise(once == again, f"filter {name!r} returns {once!r}, then {again!r}, for the same group")
    odd = CheckedFilter(name, found.function, {**found.options, NO_SUCH_OPTION: 1})
    group = group_of((0.0, 1.0))
    _refuses(f"filter {name!r} accepts an unknown option", lambda: odd.refuses(group, entries[0]), FilterError)


def check_curriculum(name: str, entries: Entries, *, options: Mapping[str, Option] | None = None) -> None:
    """Check a curriculum: it gives the same key for the same entry, in any epoch, and rejects unknown options.

    Raises ContractBroken, PluginFault.
    """
    found = find_curriculum(name)
    for epoch in range(3):
        keys = [found(_view(epoch, dict(options or {}))) for _ in range(2)]
        _promise(
            (keys[0] is None) == (keys[1] is None),
            f"curriculum {name!r} gives a key for epoch {epoch} in one call and none in another",
        )
        for entry in entries:
            values = [key("data", dict(entry)) for key in keys if key is not None]
            _promise(len(set(values)) < 2, f"curriculum {name!r} gives {values} for the same entry of epoch {epoch}")
    odd = _view(0, {**(options or {}), NO_SUCH_OPTION: 1})
    _refuses(f"curriculum {name!r} accepts an unknown option", lambda: found(odd), CurriculumError)


def alternate_answers(asked: Asked) -> str:
    """Return the response to a request: by turns the entry's `answer` and a wrong one; for greedy sampling always the answer."""
    right = str(asked.prompt.fields.get("answer", ""))
    return right if asked.greedy or (asked.index + asked.prompt.ref.seq) % 2 == 0 else f"{right}?"


async def _to_its_end(name: str, cluster: FakeCluster) -> None:
    try:
        async with limit_time(HANGS_S):
            await cluster.run(find_flow(name))
    except TimeoutError as error:
        waits = f"step {cluster.head + 1} of {cluster.spec.flow.steps}"
        raise ContractBroken(f"flow {name!r} hangs in {waits}: it waits for something that never happens") from error
    except GcoreError as error:
        raise ContractBroken(
            f"flow {name!r} does not pass an error of an engine, a reward or a filter on to its batch, or raises one: {error}"
        ) from error


def _check_steps(name: str, cluster: FakeCluster) -> None:
    steps, quota = cluster.spec.flow.steps, cluster.spec.flow.groups_per_step
    _promise(cluster.head == steps, f"flow {name!r} ended after {cluster.head} of {steps} steps")
    for number, groups in enumerate(cluster.trained, 1):
        state = cluster.steps[number]
        _promise(len(groups) == quota, f"flow {name!r} trained {len(groups)} of {quota} groups in step {number}")
        for peer in cluster.peers:
            _promise(peer.name in state.through, f"flow {name!r} does not wait for step.train() in step {number}")
            _promise(peer.name in state.published, f"flow {name!r} does not wait for step.publish() in step {number}")
        for group in groups:
            _check_group(name, group)
            why = untrainable_reason(group, cluster.spec.train)
            _promise(why is None, f"flow {name!r} made an invalid group, which would fail its prompt: {why}")
    some = min(cluster.unfiltered, default=None)
    _promise(some is None, f"flow {name!r} gave the group of prompt {some} to its batch without calling peer.filter")


def _check_group(name: str, group: Group) -> None:
    what = f"flow {name!r} made a group of prompt {group.ref}"
    _promise(bool(group.samples), f"{what} without a sample")
    for sample in group.samples:
        _promise(bool(sample.token_ids), f"{what} with a sample of no tokens")
        same = len(sample.token_ids) == len(sample.logprobs)
        _promise(same, f"{what} with {len(sample.token_ids)} tokens and {len(sample.logprobs)} log-probabilities")
        _promise(math.isfinite(sample.reward), f"{what} with a reward of {sample.reward}")


def _scored(name: str, reward: OpenReward, response: str, entry: Mapping[str, Any]) -> RewardResult:
    try:
        return reward(response if is_picture(response) else Response(response, len(response) + 1), entry)
    except RewardError as error:
        shown = repr(response if len(response) < 40 else f"{response[:40]}…")
        trace = plugin_trace(error)
        raise ContractBroken(
            f"reward {name!r} cannot score the response {shown}: {error}; a nonsense response must get a low score and must "
            f"not raise{f'{chr(10)}{trace}' if trace else ''}"
        ) from error


def _kept(found: CheckedFilter, group: Group, entry: Mapping[str, Any]) -> str | None:
    try:
        return found.refuses(group, entry)
    except FilterError as error:
        rewards = [sample.reward for sample in group.samples]
        raise ContractBroken(f"filter {found.name!r} failed for a group with rewards {rewards}: {error}") from error


def _view(epoch: int, options: Mapping[str, Option]) -> CurriculumView:
    some = {"data": SourceStatistics(kept=3, filtered=1, mean_reward=0.5, mean_length=7.0, truncated=0.0)}
    return CurriculumView(0, epoch, options, ("data",), some, some)


def _promise(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractBroken(otherwise)


def _refuses(what: str, act: Callable[[], object], kind: type[GcoreError]) -> None:
    try:
        act()
    except kind as error:
        _promise(not plugin_trace(error), f"{what} and fails on it by accident: {error}")
        return
    raise ContractBroken(f"{what}; a misspelt option would be ignored silently")


def _says_so(what: str, act: Callable[[], object], kind: type[GcoreError]) -> None:
    """Call `act`; if it fails, check that the plug-in raised `kind` itself, and did not fail with another exception."""
    try:
        act()
    except kind as error:
        _promise(
            not plugin_trace(error), f"{what}: it fails by accident ({error}); raise {kind.__name__} with a sentence"
        )
