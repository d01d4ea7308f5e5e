"""What a job is made of, opened once on each controller, and the seed of each sample.

Opening touches the disk and may take long: it is done off the event loop, and this module only names what came of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gcore.config import JobSpec
from gcore.prompts.dataset import Dataset
from gcore.prompts.render import PromptRenderer
from gcore.prompts.stream import PromptStream
from gcore.reward.registry import Reward
from gcore.types import PromptRef


@dataclass(frozen=True)
class Material:
    """What a job is made of, opened once."""

    spec: JobSpec
    uid: str
    stream: PromptStream
    evaluation: Dataset | None
    renderer: PromptRenderer
    limit: int | None
    """Most tokens of a prompt."""
    reward: Reward


def sample_seed(material: Material, ref: PromptRef, index: int, reissue: int) -> int:
    """A sample's seed: a hash of (job's name and seed, prompt ref, sample index, re-issue), 63 bits.

    The name and the seed, not the uid: the same spec started anew draws the same samples.
    """
    text = f"{material.spec.name}|{material.spec.seed}|{ref}|{index}|{reissue}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
