"""`python -m gcore.reward FD BEGUN`: a process that scores for a controller (`gcore.worker.sandbox.child`).

    controller -> process   {"rewards": [[SOURCE, SPEC]...], "memory_mb": 4096}                      once
    controller -> process   [[REWARD, FIELDS, [[TEXT, TOKENS, TRUNCATED, ENVIRONMENT]...]]...]       a batch; REWARD is an index;
                                                                                      null for a response: check FIELDS
    process -> controller   [VALUE, [[PART, NUMBER]...]] or {"what": ...}             per response, in order, several at once

It loads the given rewards and only the modules of gcore that they need: no engine, no torch, no store. It scores one
response at a time. Results of fast rewards are sent together, so the process writes the index of the current response
into BEGUN. From there the controller reads on which response the process hangs or dies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.plugins import PluginFault
from gcore.reward.api import OpenReward, Response, RewardError, Scored, ScoringCall, score_response
from gcore.system.clock import SystemClock
from gcore.worker.sandbox.child import Answers, ProgressCell, encode_line, error_fields, serve

TOGETHER_S = 0.002
"""Seconds for which results are collected: each line that is sent wakes the controller."""


def parse_batch(batch: Any) -> list[ScoringCall]:
    """Inverse of `batch_line`."""
    return [
        (reward, fields, None if response is None else Response(*response))
        for reward, fields, responses in batch
        for response in responses
    ]


def answer_line(scored: Scored) -> bytes:
    """Encode a response's reward or error."""
    if isinstance(scored, RewardError):
        return encode_line(error_fields(scored, scored.trace))
    return encode_line((scored.value, scored.parts))


def open_reward(source: str, spec: RewardSpec) -> OpenReward:
    """Find and start the reward of `source`. Raises PluginFault."""
    try:
        return OpenReward.of(spec)
    except (PluginFault, RewardError) as error:
        where = f"{error.where or 'reward'} of source {source!r}"
        raise PluginFault(error.what, where=where, fix=error.fix, trace=error.trace) from error


def main() -> None:
    """Run the process."""
    begun, clock = ProgressCell(int(sys.argv[2])), SystemClock()

    def load(setup: dict[str, Any]) -> Answers:
        rewards = [open_reward(source, RewardSpec.model_validate(spec)) for source, spec in setup["rewards"]]

        def answer_batch(number: int, batch: Any) -> Iterator[bytes]:
            answers, since = [], clock.monotonic()
            for place, (reward, fields, response) in enumerate(parse_batch(batch)):
                begun.write(number, place)
                answers.append(answer_line(score_response(rewards[reward], response, fields)))
                if (now := clock.monotonic()) - since > TOGETHER_S:
                    yield b"".join(answers)
                    answers, since = [], now
            yield b"".join(answers)

        return answer_batch

    serve(load)


if __name__ == "__main__":
    main()
