"""`python -m gcore.reward FD BEGUN`: a process that scores for a controller (`gcore.worker.sandbox.child`).

    controller -> process   {"rewards": [[SOURCE, SPEC]...], "memory_mb": 4096}                      once
    process -> controller   {"ready": true, "facts": {"batch_rewards": [REWARD...]}}                 once; REWARD is an index
    controller -> process   [[REWARD, FIELDS, [[TEXT, TOKENS, TRUNCATED, ENVIRONMENT]...], GROUP]...]       a batch of calls;
                                                                                      null for a response: check FIELDS;
                                   [[PATH, SHA256, HEIGHT, WIDTH]...] after ENVIRONMENT for pictures of the
                                   prompt, another such list for those of tools, and
                                   [PATH, SHA256, HEIGHT, WIDTH] for a generated one
    process -> controller   [[VALUE, [[PART, NUMBER]...]] or {"what": ...}...]        per call, in order, several at once

With GROUP true the responses of an item are one call, for a batch reward. Otherwise each response is a call.

It loads the given rewards and only the modules of gcore that they need: no engine, no torch, no store. It runs one call
at a time. Results of fast rewards are sent together, so the process writes the index of the current call
into BEGUN. From there the controller reads in which call the process hangs or dies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.plugins import PluginFault
from gcore.reward.api import OpenReward, Response, RewardError, Scored, ScoringCall, score_responses
from gcore.system.clock import SystemClock
from gcore.worker.sandbox.child import Loaded, ProgressCell, encode_line, error_fields, serve

TOGETHER_S = 0.002
"""Seconds for which results are collected before they are sent, because each write wakes the controller."""


def parse_batch(batch: Any) -> list[ScoringCall]:
    """Parse a batch from the controller into calls: one response each, or a whole group for a batch reward.

    Inverse of `gcore.reward.pool.batch_line`.
    """
    calls: list[ScoringCall] = []
    for reward, fields, told, group in batch:
        responses = tuple(None if response is None else Response(*response) for response in told)
        calls += [(reward, fields, some, group) for some in ([responses] if group else zip(responses, strict=True))]
    return calls


def answer_line(scored: Sequence[Scored]) -> bytes:
    """Encode the results of one call, in order. If several responses share an error, its traceback is sent once."""
    told: list[Any] = []
    for number, one in enumerate(scored):
        if isinstance(one, RewardError):
            told.append(error_fields(one, "" if number and scored[number - 1] is one else one.trace))
        else:
            told.append((one.value, one.parts))
    return encode_line(told)


def open_reward(source: str, spec: RewardSpec) -> OpenReward:
    """Find and start the reward of the data source `source`. Raises PluginFault."""
    try:
        return OpenReward.of(spec)
    except (PluginFault, RewardError) as error:
        where = f"{error.where or 'reward'} of source {source!r}"
        raise PluginFault(error.what, where=where, fix=error.fix, trace=error.trace) from error


def main() -> None:
    """Load the rewards, then score the controller's batches until it closes the connection."""
    begun, clock = ProgressCell(int(sys.argv[2])), SystemClock()

    def load(setup: dict[str, Any]) -> Loaded:
        rewards = [open_reward(source, RewardSpec.model_validate(spec)) for source, spec in setup["rewards"]]

        def answer_batch(number: int, batch: Any) -> Iterator[bytes]:
            answers, since = [], clock.monotonic()
            for place, (reward, fields, responses, group) in enumerate(parse_batch(batch)):
                begun.write(number, place)
                answers.append(answer_line(score_responses(rewards[reward], responses, fields, group=group)))
                if (now := clock.monotonic()) - since > TOGETHER_S:
                    yield b"".join(answers)
                    answers, since = [], now
            yield b"".join(answers)

        batched = [number for number, reward in enumerate(rewards) if reward.is_batch]
        return Loaded(answer_batch, {"batch_rewards": batched})

    serve(load)


if __name__ == "__main__":
    main()
