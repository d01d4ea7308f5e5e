"""Advantages for people: each rank writes those of its samples that are kept for `gcore samples`.

A disk that takes nothing is logged; the step goes on. What is written is what the updates used, before any is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gcore.config.reading import SamplesSpec
from gcore.samples import folder
from gcore.samples.choice import chosen
from gcore.samples.records import KeptAdvantage
from gcore.train.cut_step import Place, Step
from gcore.types import Version

log = logging.getLogger(__name__)


def show_advantages(run_dir: Path, spec: SamplesSpec, step: Step, advantages: Mapping[Place, Tensor]) -> None:
    """Write them down if the step's samples are kept. `advantages`: [b, 1] or [b, w] by micro-batch."""
    token = step.work.seal.token
    if not spec.due(token.step):
        return
    wanted = {group.digest for group in chosen(step.work.seal, spec.groups)}
    found = list(_advantages(step, advantages, wanted))
    try:
        folder.write(run_dir, Version(token.lineage, token.step), folder.advantages_name(step.work.rank), found)
    except OSError as error:
        log.warning("the advantages of step %d are not kept: %s", token.step, error)


def _advantages(step: Step, advantages: Mapping[Place, Tensor], wanted: set[str]) -> Iterator[KeptAdvantage]:
    for place in step.places():
        batch, values = step.at(place), advantages[place].detach()
        for row, slot in enumerate(batch.slots):
            digest = step.work.seal.groups[slot.group].digest
            scored = batch.scored[row]
            if digest not in wanted or not bool(scored.any()):
                continue
            own = values[row].expand(scored.shape)[scored].double()
            least, most = float(own.min()), float(own.max())
            mean = float(own.mean())
            if least == most:
                yield KeptAdvantage(digest=digest, sample=slot.sample, mean=least)
            else:
                yield KeptAdvantage(digest=digest, sample=slot.sample, mean=mean, least=least, most=most)
