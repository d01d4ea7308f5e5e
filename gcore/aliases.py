"""Alias until 0.3: lets packages of users import modules, functions and classes of gcore under their old names.

The import of an old module gives a DeprecationWarning that names the new modules. The use of a renamed function or class gives one with its
new name.

`AliasFinder` is last in `sys.meta_path`, so it costs nothing where a module is found under its own name. Programs that daemons
start with `python -m` have files with their old names instead. The finder and its loader have no base classes: `importlib.abc` would
load `tempfile`, `random` and 30 modules more into every process of gcore.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

REMOVED_IN = "0.3"
MOVED: dict[str, tuple[str, ...]] = {
    "gcore.agents.api": ("gcore.rollout.agents.api",),
    "gcore.atomic": ("gcore.system.files",),
    "gcore.clock": ("gcore.system.clock",),
    "gcore.config.cluster": ("gcore.config.local_cluster",),
    "gcore.environments.api": ("gcore.rollout.environments.api",),
    "gcore.estimators": ("gcore.ledger.evaluation",),
    "gcore.metrics": (
        "gcore.observability.metrics",
        "gcore.observability.step_metrics",
    ),
    "gcore.metrics.calls": ("gcore.observability.metrics",),
    "gcore.metrics.declared": ("gcore.observability.registry",),
    "gcore.metrics.generation": ("gcore.observability.step_metrics",),
    "gcore.metrics.judges": ("gcore.observability.step_metrics",),
    "gcore.metrics.membership": ("gcore.observability.metrics",),
    "gcore.metrics.slots": ("gcore.observability.metrics",),
    "gcore.metrics.steps": ("gcore.observability.step_metrics",),
    "gcore.metrics.store": ("gcore.observability.metrics",),
    "gcore.prepare": ("gcore.quickstart",),
    "gcore.prepare.lesson": ("gcore.quickstart.lessons",),
    "gcore.prepare.progress": ("gcore.quickstart.folder",),
    "gcore.prepare.small_model": ("gcore.quickstart.pretraining",),
    "gcore.prepare.starter_tasks": ("gcore.quickstart.starter",),
    "gcore.prepare.teaching": ("gcore.quickstart.pretraining",),
    "gcore.prompts.curriculum": ("gcore.data.curriculum",),
    "gcore.reward.generative": (
        "gcore.config.reward",
        "gcore.reward.judges.types",
        "gcore.reward.judges.judge",
        "gcore.reward.judges.template",
        "gcore.reward.judges.parsers",
    ),
    "gcore.testing.algorithm_contract": ("gcore.testing.training",),
    "gcore.testing.contract": ("gcore.testing.contracts",),
    "gcore.testing.fake_peer": ("gcore.testing.flows",),
    "gcore.testing.tiny_model": ("gcore.testing.models",),
    "gcore.tracking.api": ("gcore.observability.tracking",),
    "gcore.train.algorithms.aggregate": ("gcore.train.algorithms.losses",),
    "gcore.train.algorithms.corrections": ("gcore.train.algorithms.losses",),
    "gcore.train.algorithms.kl": ("gcore.train.algorithms.losses",),
    "gcore.train.algorithms.returns": ("gcore.train.algorithms.advantages",),
    "gcore.train.algorithms.schedule": ("gcore.config.train",),
    "gcore.train.algorithms.shaping": ("gcore.train.algorithms.advantages",),
    "gcore.train.algorithms.whitening": ("gcore.train.algorithms.advantages",),
    "placement.live": (
        "placement.policies.base",
        "placement.placer",
        "placement.policies.simple",
        "placement.policies.dynamic",
    ),
    "placement.policies.climbing": ("placement.policies.simple",),
    "placement.policies.fixed": ("placement.policies.simple", "placement.slots"),
    "placement.replicas": ("placement.slots",),
    "placement.split": ("placement.slots",),
}
"""By the old name of a module: the modules that have its public names now. A name comes from the first of them that has it."""
RENAMED: dict[str, dict[str, str]] = {
    "gcore.agents.api": {
        "Refused": "AgentRequestRefused",
    },
    "gcore.atomic": {
        "sweep": "sweep_drafts",
        "sync": "sync_path",
        "whole_file": "replace_file",
        "whole_folder": "replace_folder",
    },
    "gcore.config.cluster": {
        "LocalCluster": "LocalClusterState",
    },
    "gcore.metrics.declared": {
        "Declared": "MetricsBase",
    },
    "gcore.metrics.steps": {
        "StepMetrics": "ChainMetrics",
    },
    "gcore.prepare.lesson": {
        "shuffled": "shuffle_exercises",
    },
    "gcore.prepare.small_model": {
        "deterministic": "deterministic_torch",
        "responses": "generate_responses",
    },
    "gcore.prepare.starter_tasks": {
        "one_pass": "bubble_pass",
    },
    "gcore.prepare.teaching": {
        "Taught": "TaughtModel",
        "right_once": "any_sample_accuracy",
        "teach": "teach_model",
    },
    "gcore.prompts.curriculum": {
        "ReadLater": "LazyFields",
        "arranged": "arrange_shard",
    },
    "gcore.reward.generative": {
        "Ask": "ChatCall",
        "Seen": "JudgeObserver",
        "Value": "ScoreCall",
    },
    "gcore.testing.contract": {
        "by_turns": "alternate_answers",
    },
    "placement.live": {
        "Moving": "PlacementRequest",
        "NewPolicy": "PolicyFactory",
        "Start": "PolicyStart",
        "bounds_of": "find_bounds",
        "mended": "mend_plan",
        "nearest_fixed": "nearest_to_pin",
        "obeying": "apply_pin",
        "placed": "place_split",
        "slots_allow": "slot_bounds",
        "too_few": "too_few_slots",
    },
    "placement.policies.climbing": {
        "HillClimb": "HillClimbPolicy",
        "shifted": "shift_slots",
        "threshold": "new_threshold_policy",
    },
    "placement.policies.fixed": {
        "Colocated": "ColocatedPolicy",
        "Static": "StaticPolicy",
        "even": "even_split",
        "nearest": "nearest_split",
        "possible": "feasible_splits",
    },
    "placement.replicas": {
        "Sizes": "ReplicaSizes",
        "groups": "replica_groups",
        "spanned": "plan_sizes",
    },
    "placement.split": {
        "Bounds": "SplitBounds",
        "distance": "split_distance",
        "turns": "count_turns",
    },
}
"""By the old name of a module, and the old name of something in it: the new name, which one of the modules in `MOVED` has."""


class AliasFinder:
    """Finds modules under their old names (the keys of `MOVED`), for the import system."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module spec if `name` is the old name of a module, otherwise None."""
        if name not in MOVED:
            return None
        return ModuleSpec(
            name, cast("Loader", _AliasLoader()), is_package=any(other.startswith(name + ".") for other in MOVED)
        )


class _AliasLoader:
    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that the import system creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Warn that the module has moved, and make its names come from the new modules."""
        old, homes = module.__name__, MOVED[module.__name__]
        instead = " or ".join(homes)
        warnings.warn(
            f"{old} has moved: import from {instead}; {old} goes in gcore {REMOVED_IN}",
            DeprecationWarning,
            stacklevel=2,
        )

        def look_up(name: str) -> object:
            new = RENAMED.get(old, {}).get(name, name)
            for home in () if name.startswith("__") else homes:
                found = importlib.import_module(home)
                if not hasattr(found, new):
                    continue
                if new != name:
                    renamed = f"{old}.{name} is {home}.{new} now; the old name goes in gcore {REMOVED_IN}"
                    warnings.warn(renamed, DeprecationWarning, stacklevel=2)
                return getattr(found, new)
            raise AttributeError(f"module {old!r} has no attribute {name!r}; it has moved to {instead}")

        module.__dict__["__getattr__"] = look_up


def install() -> None:
    """Add `AliasFinder` to the import system, once."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(AliasFinder())
