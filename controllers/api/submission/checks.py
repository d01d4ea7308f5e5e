"""Everything that can be known to be wrong with a spec before it is a job.

A controller checks before it creates a job; `gcore validate` checks too, looks at every prompt and shows what was found. Cheap checks
come first. Judges are not asked anything; for an external judge only the presence of its key on this node is checked. Nothing is
written but the data caches and the folder of the runs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.flow.curriculum_orders import check_curriculum
from controllers.flow.job_data import rewards_of
from controllers.inference.judges import blame_judge, judge_renderer
from gcore.config.load import find_flow
from gcore.config.reward import Fallback, JudgeSpec
from gcore.config.rollout import EnvironmentSpec
from gcore.config.spec import JobSpec
from gcore.config.validation import SAYS_NOTHING
from gcore.data.renderer import PromptRenderer
from gcore.data.stream import JobPrompts, LengthReport, PromptSource, check_lengths, open_prompts, spread_entries
from gcore.engines.emulated.launch import is_emulated
from gcore.engines.sglang.command import HOW, check_engine_args, find_python
from gcore.errors import DataError, GcoreError, SpecError
from gcore.flows.filters import find_filters, try_filters
from gcore.ledger.records.cluster import ModelConfigs, attention_equals_at
from gcore.ledger.records.job import NodeRecord
from gcore.ledger.selection import MOST_BYTES, cursor_bytes, offer_bytes, seal_bytes
from gcore.models.checks import check_classifier, check_critic, check_whole, read_config
from gcore.models.hubs import hub_model
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.observability.tracking import check_trackers
from gcore.plugins import PluginFault, check_plugin
from gcore.reward.api import REWARDS, Response, RewardError
from gcore.reward.judges.external import judge_key, new_client
from gcore.reward.judges.parsers import find_parser
from gcore.reward.judges.template import Question
from gcore.reward.judges.types import JudgeError
from gcore.reward.pool import RewardTrial
from gcore.reward.scorer import reward_functions
from gcore.rollout.agents.server import try_agent
from gcore.rollout.environments.pool import try_environment
from gcore.rollout.environments.tools import TagCallFormat, call_format
from gcore.types import Prompt
from placement.mapping.workload import relevant_sizes
from placement.policies.base import find_policy
from placement.slots import count_noun

HEADS = "num_attention_heads"
"""As configurations call them."""

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


def check_engine(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether the nodes have the engine that the job wants: each of them runs some. Emulated slots have every engine. Raises SpecError."""
    without = sorted(node.name for node in nodes if not node.sglang and not all(map(is_emulated, node.slots)))
    where = next(iter(wants_sglang(spec)), None)
    if where is not None and (without or not nodes):
        which = "no node has SGLang" if len(without) == len(nodes) else f"SGLang is missing on {', '.join(without)}"
        raise SpecError(which, where=where, fix=f"{HOW}, and start the nodes again; or set {where}: torch")


def wants_sglang(spec: JobSpec) -> tuple[str, ...]:
    """The settings of a spec that ask for SGLang."""
    judges = enumerate(spec.judges)
    wanted = ["rollout.engine"] * (spec.rollout.engine == "sglang")
    return (*wanted, *(f"judges.{number}.serving.engine" for number, one in judges if one.serving.engine == "sglang"))


def check_served_judges(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether every node has slots that can serve the judges. Raises SpecError."""
    classifiers = [judge.name for judge in spec.served_judges if judge.kind == "classifier"]
    emulated = sorted(node.name for node in nodes if any(map(is_emulated, node.slots)))
    if classifiers and emulated:
        raise SpecError(
            f"judge {classifiers[0]!r} is a classifier, and the emulated slots of {', '.join(emulated)} serve judges that write only",
            where="judges",
            fix="Take a judge of kind: generative there",
        )


def check_ranks(spec: JobSpec, most: int | None) -> None:
    """Whether as many train ranks, and as many slots, will ever be there. `most`: the slots of a cluster that cannot grow; None: more nodes
    may come.

    What does not fit yet is waited for. Raises SpecError.
    """
    ranks = spec.train.ranks
    if most is not None and ranks is not None and ranks > most:
        raise SpecError(
            f"{count_noun(ranks, 'train rank')} do not fit on {count_noun(most, 'slot')}",
            where="train.ranks",
            fix="Lower train.ranks, or start the cluster anew with more --slots",
        )
    least = spec.scheduling.slots_min
    if most is not None and least > most:
        raise SpecError(
            f"{count_noun(least, 'slot')} are the fewest to run on, and there are {count_noun(most, 'slot')}",
            where="scheduling.slots_min",
            fix="Lower it, or start the cluster anew with more --slots",
        )


def check_copies(spec: JobSpec, *, local: bool) -> None:
    """Whether nodes that are to share no folder can have one each. `local`: it is the cluster of `gcore up`. Raises SpecError."""
    if local and spec.storage.copies is not None:
        raise SpecError(
            "the nodes of a local cluster share one folder, where what lies once would count as several copies",
            where="storage.copies",
            fix="Leave it out, or submit the job to a cluster whose nodes have a run_root each",
        )


def local_warning(spec: JobSpec) -> str | None:
    """What a job wants that this machine does not have, as a warning: it may be there on the machines that run it."""
    if (wanted := wants_sglang(spec)) and find_python() is None:
        return f"warning: {wanted[0]} is sglang, and SGLang was not found on this machine. {HOW}"
    return None


@dataclass(frozen=True)
class CheckedJudge:
    """A judge with its small files. `model`: None of an external one."""

    number: int
    spec: JudgeSpec
    question: Question
    model: ResolvedModel | None = None
    renderer: PromptRenderer | None = None

    def check_question(self, prompt: Prompt, source: str) -> None:
        """Whether it can be asked about `prompt`, the longest of a source, at all. Raises SpecError."""
        where = f"judges.{self.number} ({self.spec.name!r}), source {source!r}"
        try:
            pairwise = self.spec.mode == "pairwise"
            question = self.question.between(prompt, "", "") if pairwise else self.question.about(prompt, "")
        except JudgeError as error:
            raise SpecError(error.what, where=where, fix=error.fix) from error
        if self.renderer is None or self.spec.model is None:
            return
        given, own = self.spec.model.max_length, self.renderer.max_length
        # What SGLang's context may be depends on more of the model's configuration, which it looks at itself.
        if given is not None and own is not None and given > own and self.spec.serving.engine == "torch":
            raise SpecError(
                f"max_length is {given}, and the judge's own context is {own}",
                where=f"judges.{self.number}.model.max_length",
                fix="Leave it out, or lower it",
            )
        limit = self.spec.model.max_length or self.renderer.max_length
        try:
            tokens = len(self.renderer.encode(self.renderer.render(question)))
        except DataError as error:
            raise SpecError(
                f"it cannot be asked about the longest prompt: {error.what}",
                where=where,
                fix=f"Change judges.{self.number}.template, or take a model whose tokenizer takes it",
            ) from error
        classifies = self.spec.kind == "classifier"
        answer = 0 if classifies else self.spec.max_new_tokens
        if limit is not None and tokens + answer >= limit:
            more = "" if classifies else f" with max_new_tokens ({answer})"
            shorter = "Lower" if classifies else f"Lower judges.{self.number}.max_new_tokens or"
            raise SpecError(
                f"what it is shown of the longest prompt has {tokens} tokens, and{more} no room for a "
                f"response is left in the judge's context of {limit}",
                where=where,
                fix=f"{shorter} data.max_prompt_tokens, show the judge less, or take one with a longer context",
            )


def check_fallbacks(spec: JobSpec) -> None:
    """Whether there are rewards of the names that score where a judge cannot. Loads nothing. Raises PluginFault."""
    for number, judge in enumerate(spec.judges):
        if isinstance(judge.on_error, Fallback):
            kind = replace(REWARDS, where=f"judges.{number}.on_error.fallback")
            check_plugin(kind, judge.on_error.fallback)


def check_judges(spec: JobSpec) -> Mapping[str, CheckedJudge]:
    """Every judge of the spec, by name. Blocks. Raises SpecError, ModelError, DataError."""
    return {judge.name: _check_judge(number, judge) for number, judge in enumerate(spec.judges)}


def _check_judge(number: int, judge: JudgeSpec) -> CheckedJudge:
    where = f"judges.{number}"
    question = Question.compile(judge, where)
    find_parser(judge.verdict.parser, f"{where}.verdict.parser")
    check_engine_args(judge.serving.engine_args)
    if judge.model is None:
        new_client(judge, judge_key(judge, os.environ, where))
        return CheckedJudge(number, judge, question)
    with blame_judge(number, judge):
        model = resolve_model(judge.model.path, trust_remote_code=judge.model.trust_remote_code, weights=False)
        if hub_model(judge.model.path) is None and model.folder.is_dir():
            check_whole(model.folder)
        if judge.kind == "classifier":
            check_classifier(read_config(model.folder), where=str(model.folder))
    here = judge.model_copy(update={"model": judge.model.model_copy(update={"path": str(model.folder)})})
    return replace(CheckedJudge(number, judge, question), model=model, renderer=judge_renderer(number, here))


def judge_revisions(judges: Mapping[str, CheckedJudge]) -> dict[str, str]:
    """The commits of those models that are a hub's, by judge."""
    return {
        name: judge.model.revision for name, judge in judges.items() if judge.model is not None and judge.model.revision
    }


def judge_remote_code(judges: Mapping[str, CheckedJudge]) -> tuple[str, ...]:
    """Python files that come with the judges' models and will run."""
    return tuple(
        f"{judge.spec.name}: {Path(file).name}"
        for judge in judges.values()
        if judge.model
        for file in judge.model.remote_code
    )


def check_spans(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether each node's slots can be divided by the size of an engine: a replica crosses no node's boundary. What comes later with
    other slots is used as far as it goes (`placement.slots`). Raises SpecError."""
    for _, where, size in _wide(spec):
        odd = next((node for node in sorted(nodes, key=lambda one: one.name) if len(node.slots) % size), None)
        if odd is not None:
            raise SpecError(
                f"an engine of {size} slots lies on one node, and node {odd.name} has {count_noun(len(odd.slots), 'slot')}",
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


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source, and how long its prompts are. `held_out`: whether it is for evaluation."""

    opened: PromptSource
    lengths: LengthReport
    held_out: bool


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A checked spec: its resolved sources, models and judges, with their files as they are now.

    `attention_equals_at`: how the model weighs long samples (`gcore.ledger.records.cluster`).
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
        checked = _check_source(spec, run_root, cache_dir, rewards, sample, progress)
    first = checked.prompts.stream.sources[0].dataset
    try_filters(filters, spec.flow.samples_per_prompt, first.entry(0) if len(first) else {})
    return checked


def _check_source(
    spec: JobSpec,
    run_root: Path,
    cache_dir: Path,
    rewards: RewardTrial,
    sample: int | None,
    progress: CheckProgress | None,
) -> CheckedJob:
    _check_step_size(spec)
    if spec.flow.steps is not None:
        check_kept_checkpoints(spec, 0)
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
    check_kept_checkpoints(spec, prompts.prompts)
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
        policy=relevant_sizes(read_config(policy)),
        critic=None if critic is None else relevant_sizes(read_config(Path(critic))),
        judges={name: relevant_sizes(read_config(folder)) for name, folder in served.items()},
    )


def check_tags(environment: EnvironmentSpec, renderer: PromptRenderer) -> None:
    """Whether the model can write, and be shown, what stands around a call between tags. Raises SpecError."""
    if environment.name != SAYS_NOTHING:
        return
    form = call_format(environment.options, environment.tools.names, chat=renderer.chat)
    if not isinstance(form, TagCallFormat):
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
    opened: PromptSource, among: int, sample: int | None, progress: CheckProgress | None, *, held_out: bool
) -> CheckedSource:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(f"counting the tokens of {opened.name}", done, total)

    return CheckedSource(opened, check_lengths(opened, among=among, sample=sample, progress=tell), held_out)


def _try_reward(rewards: RewardTrial, checked: CheckedSource, spec: JobSpec) -> None:
    """Score an empty response to a few prompts: an option that is misspelt fails all alike. Then check the expected answer of every
    entry whose prompt was counted.

    Raises SpecError if none of the few can be scored, and for the first entry whose answer the reward cannot use. Judges are not asked.
    """
    source, dataset = checked.opened.source, checked.opened.dataset
    for reward in reward_functions(source.reward, {judge.name: judge for judge in spec.judges}):
        failed: RewardError | None = None
        for index in range(min(len(dataset), REWARDS_TRIED)):
            result = rewards.score(reward, dataset.entry(index), Response("", 0, environment=0.0))
            failed = result if isinstance(result, RewardError) else None
            if failed is None:
                break
        where = f"reward of source {source.name!r}"
        if failed is not None:
            raise PluginFault(failed.what, where=where, fix=failed.fix, trace=failed.trace) from failed
        chosen = spread_entries(checked.lengths.entries, checked.lengths.checked)
        bad = rewards.first_bad_entry(reward, (dataset.entry(index) for index in chosen))
        if bad is not None:
            place, error = bad
            raise PluginFault(
                error.what, where=f"{where}, {dataset.name_of(chosen[place])}", fix=error.fix, trace=error.trace
            ) from error


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


def check_kept_checkpoints(spec: JobSpec, prompts: int) -> None:
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
