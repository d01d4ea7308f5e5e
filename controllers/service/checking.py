"""What can be known to be wrong with a spec before it is a job: everything that needs its files, in one place.

A controller asks before it creates a job; `gcore validate` asks too, looks at every prompt, and shows what was found.
Cheap checks come first, so that a misspelt name is not told after gigabytes were read. Writes nothing but the caches of
the data, and the folder of the runs.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from controllers.material import rewards_of
from controllers.ordering import check_curriculum
from controllers.service.judge_checks import CheckedJudge, check_fallbacks, check_judges
from controllers.service.spanning import check_heads
from gcore.agents.trial import try_agent
from gcore.config import JobSpec
from gcore.config.combinations import SAYS_NOTHING
from gcore.config.environment import EnvironmentSpec
from gcore.environments.calls import Tags, form_of
from gcore.environments.trial import try_environment
from gcore.errors import GcoreError, SpecError
from gcore.flows import find_filters, find_flow
from gcore.flows.filters import try_filters
from gcore.ledger.cost import attention_equals_at
from gcore.ledger.facts import ModelConfigs
from gcore.ledger.rules import MOST_BYTES, cursor_bytes, offer_bytes, seal_bytes
from gcore.models.critic import check_critic
from gcore.models.folder import read_config
from gcore.models.names import hub_model
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.models.weights import check_whole
from gcore.plugins import PluginFault
from gcore.prompts.lengths import LengthReport, check_lengths
from gcore.prompts.opening import JobPrompts, open_prompts
from gcore.prompts.render import PromptRenderer
from gcore.prompts.source import OpenSource
from gcore.reward.judged import functions_of
from gcore.reward.registry import Response, RewardError
from gcore.reward.trial import RewardTrial
from gcore.rollout.sglang.command import check_engine_args
from gcore.tracking.registry import check_trackers
from placement.mapping.shapes import sizes_in
from placement.named import find_policy

MIN_FREE_BYTES = 64 << 20
"""On the disk of the runs: for records and logs. How much the checkpoints take, the model says."""
LENGTH_SAMPLE = 10_000
"""Prompts of a source whose length is looked at before a job starts; `gcore validate` looks at all. A longer one fails
alone."""

REWARDS_TRIED = 3
MOST_FOR_EVER = 1000
"""Checkpoints that a job may keep for ever: each stands in one record of the store, and keeps its log entry there."""

CheckProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source, and how long its prompts are. `held_out`: whether it is for evaluation."""

    opened: OpenSource
    lengths: LengthReport
    held_out: bool


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """What a spec means, with its files as they are now.

    `attention_equals_at`: how the model weighs long samples (`gcore.ledger.cost`).
    """

    prompts: JobPrompts
    sources: tuple[CheckedSource, ...]
    """Of training, then of evaluation, in the order of the spec."""
    attention_equals_at: int
    model: ResolvedModel
    """As it is on the hub now, with its small files here; the weights are fetched when the job runs."""
    judges: Mapping[str, CheckedJudge]
    models: ModelConfigs
    """What their sizes follow from."""


def check_submission(
    spec: JobSpec,
    run_root: Path,
    cache_dir: Path,
    *,
    sample: int | None = LENGTH_SAMPLE,
    progress: CheckProgress | None = None,
) -> CheckedJob:
    """Check everything about a spec that needs its files. `sample`: prompts counted of a source, None for all.

    Blocks, for minutes if the data are large and new. Raises GcoreError for the first mistake.
    """
    if spec.placement.is_live:
        find_policy(spec.placement.policy)
    find_flow(spec.flow.name)
    filters = find_filters(spec.flow.filters)
    check_engine_args(spec.rollout.engine_args)
    check_trackers(spec.tracking)
    check_fallbacks(spec)
    with RewardTrial(rewards_of(spec), spec.scoring) as rewards:
        checked = _checked(spec, run_root, cache_dir, rewards, sample, progress)
    first = checked.prompts.stream.sources[0].dataset
    try_filters(filters, spec.flow.samples_per_prompt, first.entry(0) if len(first) else {})
    return checked


def _checked(
    spec: JobSpec,
    run_root: Path,
    cache_dir: Path,
    rewards: RewardTrial,
    sample: int | None,
    progress: CheckProgress | None,
) -> CheckedJob:
    _check_step_size(spec)
    if spec.flow.steps is not None:
        check_kept(spec, 0)
    _check_disk(run_root)
    model = resolve_model(spec.model.path, trust_remote_code=spec.model.trust_remote_code, weights=False)
    if hub_model(spec.model.path) is None and model.folder.is_dir():
        check_whole(model.folder)
    if spec.train.critic is not None and spec.train.critic.path is not None:
        check_critic(spec.train.critic.path, trust_remote_code=spec.model.trust_remote_code)
    reading: CheckProgress | None = None
    if progress is not None:
        reading = lambda name, done, total: progress(f"reading {name}", done, total)  # noqa: E731
    judges = check_judges(spec)
    prompts = open_prompts(spec, cache_dir, model.folder, reading)
    _check_quota(spec, prompts.prompts)
    check_kept(spec, prompts.prompts)
    checked = [_counted(o, len(o), sample, progress, held_out=False) for o in prompts.stream.sources]
    for held_out in prompts.evaluation:
        shown = min(len(held_out), spec.eval.drawn[held_out.source.name].limit)
        checked.append(_counted(held_out.opened, shown, sample, progress, held_out=True))
    if spec.environment is not None:
        first = prompts.stream.sources[0]
        fields = first.dataset.entry(0) if len(first.dataset) else {}
        try_environment(spec.environment, fields, chat=first.renderer.chat)
        check_tags(spec.environment, first.renderer)
    if spec.agent is not None:
        try_agent(spec.agent)
    for one in checked:
        _try_reward(rewards, one, spec)
        source = one.opened.source
        for name in source.reward.judges:
            longest = one.opened.unfiltered(one.lengths.longest_entry, one.lengths.first.ref)
            judges[name].check_question(longest, source.name)
    check_curriculum(spec, prompts.stream, LENGTH_SAMPLE)
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    models = model_configs(spec, model.folder, judges)
    check_heads(spec, models)
    return CheckedJob(prompts, tuple(checked), attention_equals_at(config), model, judges, models)


def model_configs(spec: JobSpec, policy: Path, judges: Mapping[str, CheckedJudge]) -> ModelConfigs:
    """What the sizes of the job's models follow from. `policy`: its folder. Judges that others serve have none."""
    critic = spec.train.critic.path if spec.train.critic is not None else None
    served = {name: judge.model.folder for name, judge in judges.items() if judge.model is not None}
    return ModelConfigs(
        policy=sizes_in(read_config(policy)),
        critic=None if critic is None else sizes_in(read_config(Path(critic))),
        judges={name: sizes_in(read_config(folder)) for name, folder in served.items()},
    )


def check_tags(environment: EnvironmentSpec, renderer: PromptRenderer) -> None:
    """Whether the model can write, and be shown, what stands around a call between tags. Raises SpecError."""
    if environment.name != SAYS_NOTHING:
        return
    form = form_of(environment.options, environment.tools.names, chat=renderer.chat)
    if not isinstance(form, Tags):
        return
    for name in ("open", "close", "before", "after", "failed"):
        text = getattr(form, name) or ""
        if not renderer.tokenizer.can_say(text):
            raise SpecError(
                f"the model's tokenizer cannot say {text!r}",
                where=f"environment.options.{name}",
                fix="Take a text that its vocabulary has the characters of",
            )


def _counted(
    opened: OpenSource, among: int, sample: int | None, progress: CheckProgress | None, *, held_out: bool
) -> CheckedSource:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(f"counting the tokens of {opened.name}", done, total)

    return CheckedSource(opened, check_lengths(opened, among=among, sample=sample, progress=tell), held_out)


def _try_reward(rewards: RewardTrial, checked: CheckedSource, spec: JobSpec) -> None:
    """Score an empty response to a few prompts: an option that is misspelt, or answers of the wrong kind, fail all alike.

    Raises SpecError if none can be scored; a single one that cannot fails alone, when its turn comes. Judges are not asked.
    """
    source, dataset = checked.opened.source, checked.opened.dataset
    for reward in functions_of(source.reward, {judge.name: judge for judge in spec.judges}):
        failed: RewardError | None = None
        for index in range(min(len(dataset), REWARDS_TRIED)):
            result = rewards.score(reward, dataset.entry(index), Response("", 0, environment=0.0))
            failed = result if isinstance(result, RewardError) else None
            if failed is None:
                break
        if failed is not None:
            where = f"reward of source {source.name!r}"
            raise PluginFault(failed.what, where=where, fix=failed.fix, trace=failed.trace) from failed


def _check_step_size(spec: JobSpec) -> None:
    seal = seal_bytes(spec)
    if seal > MOST_BYTES:
        raise SpecError(
            f"a step of {spec.flow.groups_per_step} groups of {spec.flow.samples_per_prompt} takes about {seal >> 10} KiB "
            f"in the store, more than {MOST_BYTES >> 10}",
            where="flow.groups_per_step",
            fix="Lower it",
        )
    if offer_bytes(spec) > MOST_BYTES:
        raise SpecError(
            f"with rollout.staleness {spec.rollout.staleness} a controller may offer {spec.rollout.staleness + 1} steps of "
            f"{spec.flow.groups_per_step} groups, about {offer_bytes(spec) >> 10} KiB in the store, more than "
            f"{MOST_BYTES >> 10}",
            where="rollout.staleness",
            fix="Lower it, or flow.groups_per_step",
        )
    # A commit writes them twice: into head, and into the log.
    if 2 * cursor_bytes(spec) > MOST_BYTES:
        raise SpecError(
            f"where the stream stands may take about {cursor_bytes(spec) >> 10} KiB in the store with {spec.data.shards} shards and "
            f"windows of {spec.data.window}, more than {MOST_BYTES // 2 >> 10}",
            where="data.shards" if 24 * spec.data.shards * 2 > MOST_BYTES else "data.window",
            fix="Lower data.shards, or data.window",
        )
    if spec.flow.groups_per_step > spec.data.shards * spec.data.window:
        raise SpecError(
            f"a step takes {spec.flow.groups_per_step} groups, the shards' windows hold "
            f"{spec.data.shards * spec.data.window}",
            where="data.window",
            fix="Raise data.window or data.shards",
        )


def _check_quota(spec: JobSpec, prompts: int) -> None:
    """A step that takes more groups than there are prompts would take some of them twice."""
    if spec.flow.groups_per_step > prompts:
        raise SpecError(
            f"a step takes {spec.flow.groups_per_step} groups, and a data epoch has {prompts} prompts",
            where="flow.groups_per_step",
            fix=f"Lower it to {prompts} at most, or add data",
        )


def check_kept(spec: JobSpec, prompts: int) -> None:
    """What `checkpoint.keep_every` keeps for ever: something, and no more than the store has room for. Raises SpecError."""
    every, flow = spec.checkpoint.keep_every, spec.flow
    if every is None:
        return
    # Of a job that goes by epochs: at most, if nothing is filtered.
    epochs = flow.epochs or 1
    steps = flow.steps if flow.steps is not None else epochs * math.ceil(prompts / flow.groups_per_step)
    if every > steps:
        raise SpecError(
            f"checkpoints of every {every}th step are to be kept, and the job has {steps} steps at most: it would keep none",
            where="checkpoint.keep_every",
            fix="Lower it, or leave it out: the last step's checkpoint is kept anyway",
        )
    if steps // every > MOST_FOR_EVER:
        raise SpecError(
            f"{steps // every} checkpoints would be kept for ever, more than {MOST_FOR_EVER}",
            where="checkpoint.keep_every",
            fix=f"Raise it to a multiple of checkpoint.every ({spec.checkpoint.every}) of at least {-(-steps // MOST_FOR_EVER)}",
        )


def _check_disk(run_root: Path) -> None:
    try:
        run_root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(run_root).free
    except OSError as error:
        raise GcoreError(
            f"runs cannot be kept there ({error.strerror})",
            where=str(run_root),
            fix="Choose another --home, or storage.root",
        ) from error
    if free < MIN_FREE_BYTES:
        raise GcoreError(
            f"only {free >> 20} MiB are free on the disk, and a job is not begun with less than {MIN_FREE_BYTES >> 20}",
            where=str(run_root),
            fix="Make room; one checkpoint takes 12 bytes a parameter",
        )
