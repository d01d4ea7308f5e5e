"""Whether engines can span as many slots as a spec says (`slots_per_engine`), before anything of the job is written: by the nodes that
are there, and by the models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gcore.config import JobSpec
from gcore.errors import SpecError
from gcore.ledger.facts import ModelConfigs
from gcore.ledger.job import SPANS_CAME, NodeRecord
from gcore.schema import spoken
from placement.plan import counted

HEADS = "num_attention_heads"
"""As configurations call them."""


def check_spans(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether every node knows such engines, and has slots that can be divided by so many: a replica crosses no node's boundary. What
    comes later with other slots is used as far as it goes (`placement.plan.divided`). Raises SpecError."""
    for _, where, size in _wide(spec):
        if spoken() < SPANS_CAME:
            raise SpecError(
                "engines that span several slots need nodes of this version, and some are older",
                where=where,
                fix="Submit it when all nodes are upgraded",
            )
        odd = next((node for node in sorted(nodes, key=lambda one: one.name) if len(node.slots) % size), None)
        if odd is not None:
            raise SpecError(
                f"an engine of {size} slots lies on one node, and node {odd.name} has {counted(len(odd.slots), 'slot')}",
                where=where,
                fix="Use a size by which each node's slots can be divided, or start the controllers with other --slots",
            )


def check_heads(spec: JobSpec, models: ModelConfigs) -> None:
    """Whether each model's heads can be divided among the slots of its engines, as far as they are known. Raises SpecError."""
    for judge, where, size in _wide(spec):
        config = models.judges.get(judge, {}) if judge else models.policy
        heads = config.get(HEADS)
        if isinstance(heads, int) and heads % size:
            raise SpecError(
                f"an engine of {size} slots shares a model's heads out among them, and this one has {heads}",
                where=where,
                fix=f"Use a size that divides {heads}",
            )


def _wide(spec: JobSpec) -> Iterator[tuple[str, str, int]]:
    """The judge, empty for the policy, the field, and the slots, of engines that span several."""
    if spec.rollout.slots_per_engine > 1:
        yield "", "rollout.slots_per_engine", spec.rollout.slots_per_engine
    for number, judge in enumerate(spec.judges):
        if judge.serving.slots_per_engine > 1:
            yield judge.name, f"judges.{number}.serving.slots_per_engine", judge.serving.slots_per_engine
