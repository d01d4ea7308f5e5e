"""`python -m gcore.reward FD BEGUN`: a process that scores for a controller, over the socket FD (`gcore.reward.lines`).

It loads the rewards that it is told of, and nothing else of gcore than they need: no engine, no torch, no store. Rewards run
in its main thread, one response at a time, because libraries of mathematics limit their time by signals. What a reward prints
goes to standard error, which is the controller's log. It ends when the socket does, which no process that a reward starts has.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.plugins import PluginFault
from gcore.reward.api import OpenReward, Response, RewardError
from gcore.reward.pool import Scored, score_response
from gcore.system.clock import SystemClock
from gcore.worker.sandbox.process import ProgressCell, ScoringCall, _told, encode_line


def parse_batch(batch: Any) -> list[ScoringCall]:
    """Inverse of `batch_line`."""
    return [
        (reward, fields, Response(text, *known)) for reward, fields, responses in batch for text, *known in responses
    ]


def answer_line(scored: Scored) -> bytes:
    """A response's reward, or why it has none."""
    if isinstance(scored, RewardError):
        return encode_line(_told(scored, scored.trace))
    return encode_line((scored.value, scored.parts))


def failed_line(fault: PluginFault) -> bytes:
    """A reward that cannot be had."""
    return encode_line({"failed": _told(fault, fault.trace)})


TOGETHER_S = 0.002
"""Answers wait so long for others: each line that is sent wakes the controller."""


def main() -> None:
    """The process."""
    line, begun = socket.socket(fileno=int(sys.argv[1])), ProgressCell(int(sys.argv[2]))
    guard_answers(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        try:
            rewards = [open_reward(source, RewardSpec.model_validate(spec)) for source, spec in setup["rewards"]]
        except PluginFault as fault:
            line.sendall(failed_line(fault))
            return
        line.sendall(encode_line({"ready": True}))
        try:
            for number, batch in enumerate(heard, 1):
                answer_batch(line, begun, number, batch, rewards)
        except (BrokenPipeError, ConnectionResetError):  # nobody wants to know any more
            pass


def guard_answers(line: socket.socket) -> None:
    """A process that a reward forks cannot answer in this one's place: every answer after that would be another response's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(line.fileno(), False)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, line.fileno(), inheritable=False))


def answer_batch(
    line: socket.socket, begun: ProgressCell, number: int, batch: bytes, rewards: list[OpenReward]
) -> None:
    """Score a batch, the `number`-th from 1."""
    clock = SystemClock()
    answers, since = [], clock.monotonic()
    for place, (reward, fields, response) in enumerate(parse_batch(json.loads(batch))):
        begun.write(number, place)
        answers.append(answer_line(score_response(rewards[reward], response, fields)))
        if (now := clock.monotonic()) - since > TOGETHER_S:
            line.sendall(b"".join(answers))
            answers, since = [], now
    line.sendall(b"".join(answers))


def open_reward(source: str, spec: RewardSpec) -> OpenReward:
    """The reward of `source`, found and started. Raises PluginFault."""
    try:
        return OpenReward.of(spec)
    except (PluginFault, RewardError) as error:
        where = f"{error.where or 'reward'} of source {source!r}"
        raise PluginFault(error.what, where=where, fix=error.fix, trace=error.trace) from error


def limit_memory(megabytes: int) -> None:
    """What the process may write to: its own data, not the libraries it shares or the addresses it reserves."""
    most = megabytes << 20
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
