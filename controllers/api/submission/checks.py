"""Checks of a spec before it becomes a job.

A controller runs them before it creates a job. `gcore validate` runs them too, looks at every prompt and shows the results. Cheap checks
come first. No check queries a judge; for an external judge, only the presence of its key on this node is checked. The checks write
nothing but the data caches and the folder of the runs.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.api.submission.nodes import wide_engines
from controllers.flow.curriculum_orders import check_curriculum
from controllers.flow.job_data import rewards_of
from controllers.inference.judge_engines import QuestionEncoder
from controllers.inference.judges import blame_judge, judge_encoder
from gcore.config.capabilities import PICTURE_ENGINES, PICTURE_MODELS
from gcore.config.load import find_flow
from gcore.config.reward import Fallback, JudgeSpec
from gcore.config.rollout import EnvironmentSpec
from gcore.config.spec import JobSpec, uses_pictures
from gcore.config.train import ALL_LINEAR, TrainSpec, is_own_advantage, is_own_loss
from gcore.config.validation import SAYS_NOTHING
from gcore.data.renderer import PromptRenderer
from gcore.data.stream import JobPrompts, LengthReport, PromptSource, check_lengths, open_prompts, spread_entries
from gcore.engines.sglang import command as sglang
from gcore.engines.vllm import command as vllm
from gcore.errors import DataError, GcoreError, SpecError, explain_os_errors
from gcore.flows.filters import find_filters, try_filters
from gcore.ledger.records.cluster import ModelConfigs, attention_equals_at
from gcore.ledger.selection import MOST_BYTES, cursor_bytes, offer_bytes, seal_bytes
from gcore.media.placeholders import PictureRule
from gcore.models.adapter_checks import check_adapter
from gcore.models.checks import check_adapters, check_classifier, check_critic, check_whole, read_config
from gcore.models.diffusion.files import PipelineFiles, check_kind, policy_config
from gcore.models.diffusion.requests import PictureRequests
from gcore.models.hubs import hub_model
from gcore.models.layout import adapter_digest
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.observability.tracking import check_trackers
from gcore.plugins import PluginFault, check_plugin
from gcore.reward.api import REWARDS, Response, RewardError
from gcore.reward.judges.external import judge_key, new_client
from gcore.reward.judges.parsers import find_parser
from gcore.reward.judges.template import Question
from gcore.reward.judges.types import JudgeError
from gcore.reward.pool import RewardTrial, trial_response
from gcore.reward.scorer import reward_functions
from gcore.rollout.agents.server import try_agent
from gcore.rollout.environments.pool import try_environment
from gcore.rollout.environments.tools import TagCallFormat, call_format
from gcore.types import Prompt
from gcore.worker.sandbox.child import encode_line
from gcore.worker.sandbox.process import ProcessEnded, SandboxProcess, check_ready
from placement.mapping.workload import relevant_sizes
from placement.policies.base import find_policy

HEADS = "num_attention_heads"
"""The key of the number of attention heads in a model's configuration."""

MIN_FREE_BYTES = 64 << 20
"""Free space needed on the disk of the runs, for records and logs. The model determines the size of checkpoints."""

LENGTH_SAMPLE = 10_000
"""Prompts of a source whose length is checked before a job starts; `gcore validate` checks all. A prompt that is too long fails alone,
not the job."""

REWARDS_TRIED = 3

OBJECTIVES, OBJECTIVES_S, OBJECTIVES_MB = "gcore.train.objectives", 120.0, 8192
"""The program that tries a user's advantage estimator and loss, its time limit in seconds, and its memory limit in MiB."""

MOST_FOR_EVER = 1000
"""Maximum number of checkpoints that a job may keep forever. Each is listed in one record of the store and keeps its log entry there."""

CheckProgress = Callable[[str, int, int], None]
"""Called to report progress: with the name of the task, how much of it is done, and the total."""


def check_picture_model(spec: JobSpec, folder: Path) -> None:
    """Check that the engine serves pictures of a model of this type, for a job with pictures. `folder`: of the model.
    Raises SpecError.
    """
    served, kind = PICTURE_MODELS.get(spec.rollout.engine), read_config(folder).get("model_type")
    if kind is None:  # no model is there, which loading its tokenizer reports
        return
    if uses_pictures(spec) and served is not None and kind not in served:
        raise SpecError(
            f"the engine {spec.rollout.engine} serves pictures only of models of the type {', '.join(served)}, not {kind}",
            where="rollout.engine",
            fix="Set it to torch, or use another model",
        )


def check_arguments(engine: str, arguments: Sequence[str], where: str) -> None:
    """Check the additional arguments of an engine's command line. `where`: their field of the spec. Raises UsageError."""
    of_sglang = sglang.check_picture_engine_args if engine in PICTURE_ENGINES else sglang.check_engine_args
    (vllm.check_engine_args if engine == "vllm" else of_sglang)(arguments, where)


@dataclass(frozen=True)
class CheckedJudge:
    """A judge whose settings were checked, with the small files of its model (tokenizer, configuration). `model` None:
    it has no model of its own."""

    number: int
    spec: JudgeSpec
    question: Question
    model: ResolvedModel | None = None
    encoder: QuestionEncoder | None = None

    def check_question(self, prompt: Prompt, source: str, size: tuple[int, int] | None = None) -> None:
        """Check that the judge can score `prompt`, the longest of a source. `size`: height and width of the pictures that the
        policy generates; None: it writes text. Raises SpecError."""
        where = f"judges.{self.number} ({self.spec.name!r}), source {source!r}"
        response = Response("", picture_file=None if size is None else ("", "", *size))
        try:
            pairwise = self.spec.mode == "pairwise"
            asked = self.question.between(prompt, response, response) if pairwise else None
            question, pictures = asked or self.question.about(prompt, response)
        except JudgeError as error:
            raise SpecError(error.what, where=where, fix=error.fix) from error
        if self.encoder is None:
            return
        given = None if self.spec.model is None else self.spec.model.max_length
        own = self.encoder.max_length
        # SGLang derives its context limit from more of the model's configuration and checks it itself.
        if given is not None and own is not None and given > own and self.spec.serving.engine != "sglang":
            raise SpecError(
                f"max_length is {given}, which exceeds the judge's context of {own}",
                where=f"judges.{self.number}.model.max_length",
                fix="Leave it out, or lower it",
            )
        limit = given or own
        try:
            short, expanded = self.encoder.encode(question, pictures, None)
        except DataError as error:
            raise SpecError(
                f"the judge cannot score the longest prompt: {error.what}",
                where=where,
                fix=f"Change judges.{self.number}.template, or use a model whose tokenizer accepts it",
            ) from error
        if prompt.pictures and not pictures and self._placeholder() in short:
            raise SpecError(
                "the template shows the judge the tokens of pictures without the pictures",
                where=where,
                fix=f"Set judges.{self.number}.images: true, or show fields of the entry instead of the prompt",
            )
        tokens = len(expanded)
        classifies = self.spec.kind == "classifier"
        answer = 0 if classifies else self.spec.max_new_tokens
        if limit is not None and tokens + answer >= limit:
            more = "" if classifies else f" with max_new_tokens ({answer})"
            shorter = "Lower" if classifies else f"Lower judges.{self.number}.max_new_tokens or"
            raise SpecError(
                f"the judge's prompt for the longest item has {tokens} tokens, which{more} leaves no room for a "
                f"response in the judge's context of {limit}",
                where=where,
                fix=f"{shorter} data.max_prompt_tokens, shorten the judge's template, or use a judge with a longer context",
            )

    def _placeholder(self) -> int | None:
        """The token that stands for a picture in questions to the judge; None if its model has none."""
        if self.model is None:
            return None
        try:
            return PictureRule.load(self.model.folder).placeholder_id
        except DataError:  # it is no vision-language model
            return None


def check_fallbacks(spec: JobSpec) -> None:
    """Check that the fallback rewards of the judges exist. Loads no code. Raises PluginFault."""
    for number, judge in enumerate(spec.judges):
        if isinstance(judge.on_error, Fallback):
            kind = replace(REWARDS, where=f"judges.{number}.on_error.fallback")
            check_plugin(kind, judge.on_error.fallback)


def try_objectives(train: TrainSpec) -> None:
    """Try the user's advantage estimator and loss on artificial tensors, in a process, because this one does not import torch.

    Blocks; do not use it in an event loop. Does nothing if both are gcore's. Raises PluginFault.
    """
    if is_own_advantage(train.advantage) or is_own_loss(train.loss):
        asyncio.run(_try_objectives(train))


async def _try_objectives(train: TrainSpec) -> None:
    process = await SandboxProcess.of(
        OBJECTIVES, encode_line({"train": train.model_dump(mode="json"), "memory_mb": OBJECTIVES_MB})
    )
    how = ""
    try:
        check_ready(await process.answer(OBJECTIVES_S))
    except TimeoutError:
        how = f"took longer than {OBJECTIVES_S:g} s"
    except (ProcessEnded, ValueError):
        how = f"ended its process ({await process.end()})"
    finally:
        await process.end()
    if how:
        own = [("train.advantage", train.advantage)] * is_own_advantage(train.advantage)
        own += [("train.loss", train.loss)] * is_own_loss(train.loss)
        what = f"the trial of {' and '.join(repr(name) for _, name in own)} {how}"
        raise PluginFault(what, where=" and ".join(where for where, _ in own), fix="Correct the function")


def check_judges(spec: JobSpec) -> Mapping[str, CheckedJudge]:
    """Check every judge of the spec; return them by name. Blocks. Raises SpecError, ModelError, DataError."""
    return {judge.name: _check_judge(number, judge, spec) for number, judge in enumerate(spec.judges)}


def _check_judge(number: int, judge: JudgeSpec, spec: JobSpec) -> CheckedJudge:
    where = f"judges.{number}"
    generates = spec.rollout.diffusion is not None
    picture_text = PictureRule.load(_policy_folder(spec)).picture_text if judge.images and not generates else ""
    question = Question.compile(judge, where, picture_text, generates=generates)
    find_parser(judge.verdict.parser, f"{where}.verdict.parser")
    check_arguments(judge.serving.engine, judge.serving.engine_args, f"{where}.serving.engine_args")
    if judge.external is not None:
        new_client(judge, judge_key(judge, os.environ, where))
        return CheckedJudge(number, judge, question)
    if judge.adapter is not None:
        base = _policy_folder(spec)
        if hub_model(spec.model.path) is None and base.is_dir():
            with blame_judge(number, judge):
                check_adapter(Path(judge.adapter), base)
        return replace(CheckedJudge(number, judge, question), encoder=judge_encoder(number, judge, base))
    assert judge.model is not None
    with blame_judge(number, judge):
        model = resolve_model(judge.model.path, trust_remote_code=judge.model.trust_remote_code, weights=False)
        if hub_model(judge.model.path) is None and model.folder.is_dir():
            check_whole(model.folder)
        if judge.kind == "classifier":
            check_classifier(read_config(model.folder), where=str(model.folder), pictures=judge.images)
    encoder = judge_encoder(number, judge, model.folder)
    return replace(CheckedJudge(number, judge, question), model=model, encoder=encoder)


def _policy_folder(spec: JobSpec) -> Path:
    return resolve_model(spec.model.path, trust_remote_code=spec.model.trust_remote_code, weights=False).folder


def judge_revisions(judges: Mapping[str, CheckedJudge]) -> dict[str, str]:
    """The hub commits of the judges' models, by judge. Local models have none."""
    return {
        name: judge.model.revision for name, judge in judges.items() if judge.model is not None and judge.model.revision
    }


def adapter_digests(judges: Iterable[JudgeSpec]) -> dict[str, str]:
    """The digests of the judges' adapters, by judge. Blocks. Raises DataError."""
    found = {}
    for judge in judges:
        if judge.adapter is not None:
            with explain_os_errors("cannot read the judge's adapter", DataError, where=judge.adapter):
                found[judge.name] = adapter_digest(Path(judge.adapter))
    return found


def judge_remote_code(judges: Mapping[str, CheckedJudge]) -> tuple[str, ...]:
    """The Python files that come with the judges' models and will run."""
    return tuple(
        f"{judge.spec.name}: {Path(file).name}"
        for judge in judges.values()
        if judge.model
        for file in judge.model.remote_code
    )


def check_heads(spec: JobSpec, models: ModelConfigs) -> None:
    """Check that the engine size, and the size of a sequence group, divide each model's number of attention heads, where
    that is known. Raises SpecError."""
    together = spec.train.sequence_parallel
    for model, trained in (("model", models.policy), ("critic", models.critic or {})):
        heads = _heads(trained)
        if heads is not None and heads % together:
            divisors = [str(size) for size in range(2, heads + 1) if heads % size == 0]
            raise SpecError(
                f"a sequence group of {together} ranks cannot share the {heads} attention heads of the {model} equally",
                where="train.sequence_parallel",
                fix=f"Use {' or '.join(divisors)}, or leave it out" if divisors else "Leave it out",
            )
    for judge, where, size in wide_engines(spec):
        config = models.judges.get(judge, {}) if judge else models.policy
        heads = _heads(config)
        if heads is not None and heads % size:
            raise SpecError(
                f"{size} slots per engine do not divide the model's {heads} attention heads",
                where=where,
                fix=f"Use a size that divides {heads}",
            )


def _heads(config: Mapping[str, object]) -> int | None:
    """The number of attention heads of a model, or of the language model of a vision-language model; None: unknown."""
    heads = config.get(f"text_config.{HEADS}", config.get(HEADS))
    return heads if isinstance(heads, int) else None


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """An opened source of prompts, with the lengths of the prompts that were counted. `held_out`: whether it is used
    for evaluation only."""

    opened: PromptSource
    lengths: LengthReport
    held_out: bool


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A checked spec: its resolved sources, models and judges, with the current state of their files.

    `attention_equals_at`: how the model weighs long samples (`gcore.ledger.records.cluster`).
    """

    prompts: JobPrompts
    sources: tuple[CheckedSource, ...]
    """The training sources, then the evaluation sources, in the order of the spec."""
    attention_equals_at: int
    model: ResolvedModel
    """The current revision on the hub, with its small files downloaded. The weights are fetched when the job runs."""
    judges: Mapping[str, CheckedJudge]
    models: ModelConfigs
    """The configurations that determine the models' sizes."""


def check_submission(
    spec: JobSpec,
    run_root: Path,
    cache_dir: Path,
    *,
    sample: int | None = LENGTH_SAMPLE,
    progress: CheckProgress | None = None,
) -> CheckedJob:
    """Check everything about a spec that needs its files. `sample`: how many prompts of each source to count, None for all.
    Blocks, for minutes if the data is large and new. Raises GcoreError for the first error.
    """
    if spec.placement.is_live:
        find_policy(spec.placement.policy)
    find_flow(spec.flow.name)
    filters = find_filters(spec.flow.filters)
    check_arguments(spec.rollout.engine, spec.rollout.engine_args, "rollout.engine_args")
    check_trackers(spec.tracking)
    check_fallbacks(spec)
    with RewardTrial(rewards_of(spec), spec.scoring) as rewards:
        checked = _check_source(spec, run_root, cache_dir, rewards, sample, progress)
    first = checked.prompts.stream.sources[0].dataset
    try_filters(filters, spec.flow.samples_per_prompt, first.entry(0) if len(first) else {})
    try_objectives(spec.train)
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
    check_kind(spec, model.folder, weights=hub_model(spec.model.path) is None)
    if spec.rollout.engine == "sglang-diffusion" and spec.rollout.diffusion is not None:
        sglang.check_pipeline(PipelineFiles.read(model.folder), spec.rollout.diffusion.guidance)
    if hub_model(spec.model.path) is None and model.folder.is_dir() and spec.rollout.diffusion is None:
        check_whole(model.folder)
        if spec.train.lora is not None:
            named = ["" if target == ALL_LINEAR else target for target in spec.train.lora.targets]
            check_adapters(model.folder, named, spec.train.lora.rank)
    check_picture_model(spec, model.folder)
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
    size = None if (drawn := PictureRequests.of(spec, model.folder)) is None else drawn.size
    for one in checked:
        _try_reward(rewards, one, spec, size)
        source = one.opened.source
        for name in source.reward.judges:
            longest = one.opened.unfiltered(one.lengths.longest_entry, one.lengths.first.ref)
            judges[name].check_question(longest, source.name, size)
    check_curriculum(spec, prompts.stream, LENGTH_SAMPLE)
    config = policy_config(model.folder)
    models = model_configs(spec, model.folder, judges)
    check_heads(spec, models)
    check_freeze(spec, config)
    return CheckedJob(prompts, tuple(checked), attention_equals_at(config), model, judges, models)


def check_freeze(spec: JobSpec, config: Mapping[str, object]) -> None:
    """Check that the model has the parts that the job freezes. `config`: of the policy. Raises SpecError."""
    if spec.train.freeze and config.get("vision_config") is None:
        raise SpecError(
            f"the model ({config.get('model_type')}) has no vision tower and no projector that could be frozen",
            where="train.freeze",
            fix="Leave it out, or use a vision-language model",
        )


def model_configs(spec: JobSpec, policy: Path, judges: Mapping[str, CheckedJudge]) -> ModelConfigs:
    """The configurations that determine the models' sizes. `policy`: the folder of the policy. External judges have none."""
    critic = spec.train.critic.path if spec.train.critic is not None else None
    served = {name: judge.model.folder for name, judge in judges.items() if judge.model is not None}
    pictures = PictureRequests.of(spec, policy)
    return ModelConfigs(
        policy=relevant_sizes(policy_config(policy)) if pictures is None else pictures.sizes,
        critic=None if critic is None else relevant_sizes(read_config(Path(critic))),
        judges={name: relevant_sizes(read_config(folder)) for name, folder in served.items()},
    )


def check_tags(environment: EnvironmentSpec, renderer: PromptRenderer) -> None:
    """Check that the tokenizer can encode the tags around a tool call. Raises SpecError."""
    if environment.name != SAYS_NOTHING:
        return
    form = call_format(environment.options, tuple(environment.tools.called), chat=renderer.chat)
    if not isinstance(form, TagCallFormat):
        return
    for name in ("open", "close", "before", "after", "failed"):
        text = getattr(form, name) or ""
        if not renderer.tokenizer.can_say(text):
            raise SpecError(
                f"the model's tokenizer cannot encode {text!r}",
                where=f"environment.options.{name}",
                fix="Use a text whose characters are in its vocabulary",
            )


def _counted(
    opened: PromptSource, among: int, sample: int | None, progress: CheckProgress | None, *, held_out: bool
) -> CheckedSource:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(f"counting the tokens of {opened.name}", done, total)

    return CheckedSource(opened, check_lengths(opened, among=among, sample=sample, progress=tell), held_out)


def _try_reward(rewards: RewardTrial, checked: CheckedSource, spec: JobSpec, size: tuple[int, int] | None) -> None:
    """Score an empty response to the first few prompts, to find errors in the reward's options. Then check the expected answer of every
    entry whose prompt was counted.

    `size`: height and width of the pictures that the policy generates, which are grey here; None: it writes text. Raises PluginFault if
    the reward fails for all of the few prompts, and for the first entry whose answer it cannot use. Judges are not queried. A reward that
    opens pictures gets copies of the data's files, which are not resized.
    """
    source, dataset = checked.opened.source, checked.opened.dataset
    for reward in reward_functions(source.reward, {judge.name: judge for judge in spec.judges}):
        failed: RewardError | None = None
        for index in range(min(len(dataset), REWARDS_TRIED)):
            entry = dataset.entry(index)
            with tempfile.TemporaryDirectory(prefix="gcore-pictures-") as copies:
                given = trial_response(checked.opened.pictures_of(entry), size, Path(copies))
                result = rewards.score(reward, entry, given)
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
            f"a step of {spec.flow.groups_per_step} groups of {spec.flow.samples_per_prompt} samples takes about {seal >> 10} KiB "
            f"in the store, and the limit is {MOST_BYTES >> 10} KiB",
            where="flow.groups_per_step",
            fix="Lower it",
        )
    if offer_bytes(spec) > MOST_BYTES:
        raise SpecError(
            f"with rollout.staleness {spec.rollout.staleness} a controller may offer {spec.rollout.staleness + 1} steps of "
            f"{spec.flow.groups_per_step} groups, about {offer_bytes(spec) >> 10} KiB in the store, and the limit is "
            f"{MOST_BYTES >> 10} KiB",
            where="rollout.staleness",
            fix="Lower it, or flow.groups_per_step",
        )
    # A commit writes the cursors twice: into head and into the log.
    if 2 * cursor_bytes(spec) > MOST_BYTES:
        raise SpecError(
            f"the cursors may take about {cursor_bytes(spec) >> 10} KiB in the store with {spec.data.shards} shards and "
            f"windows of {spec.data.window}, and the limit is {MOST_BYTES // 2 >> 10} KiB",
            where="data.shards" if 24 * spec.data.shards * 2 > MOST_BYTES else "data.window",
            fix="Lower data.shards, or data.window",
        )
    if spec.flow.groups_per_step > spec.data.shards * spec.data.window:
        raise SpecError(
            f"a step takes {spec.flow.groups_per_step} groups, but the windows of the shards hold only "
            f"{spec.data.shards * spec.data.window}",
            where="data.window",
            fix="Raise data.window or data.shards",
        )


def _check_quota(spec: JobSpec, prompts: int) -> None:
    """Check that a step does not take more groups than there are prompts: it would take some prompts twice."""
    if spec.flow.groups_per_step > prompts:
        raise SpecError(
            f"a step takes {spec.flow.groups_per_step} groups, but a data epoch has only {prompts} prompts",
            where="flow.groups_per_step",
            fix=f"Lower it to {prompts} at most, or add data",
        )


def check_kept_checkpoints(spec: JobSpec, prompts: int) -> None:
    """Check that `checkpoint.keep_every` keeps at least one checkpoint and no more than the store can list. Raises SpecError."""
    every, flow = spec.checkpoint.keep_every, spec.flow
    if every is None:
        return
    # For a job that counts epochs this is an upper bound, reached if nothing is filtered.
    epochs = flow.epochs or 1
    steps = flow.steps if flow.steps is not None else epochs * math.ceil(prompts / flow.groups_per_step)
    if every > steps:
        raise SpecError(
            f"keep_every is {every}, but the job has at most {steps} steps, so it would keep no checkpoint",
            where="checkpoint.keep_every",
            fix="Lower it, or leave it out: the last step's checkpoint is kept anyway",
        )
    if steps // every > MOST_FOR_EVER:
        raise SpecError(
            f"{steps // every} checkpoints would be kept forever, and the limit is {MOST_FOR_EVER}",
            where="checkpoint.keep_every",
            fix=f"Raise it to a multiple of checkpoint.every ({spec.checkpoint.every}) of at least {-(-steps // MOST_FOR_EVER)}",
        )


def _check_disk(run_root: Path) -> None:
    try:
        run_root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(run_root).free
    except OSError as error:
        raise GcoreError(
            f"the folder of the runs cannot be created ({error.strerror})",
            where=str(run_root),
            fix="Choose another --home, or storage.root",
        ) from error
    if free < MIN_FREE_BYTES:
        raise GcoreError(
            f"only {free >> 20} MiB are free on the disk, and a job needs at least {MIN_FREE_BYTES >> 20} MiB to start",
            where=str(run_root),
            fix="Free some space. One checkpoint takes 12 bytes per parameter",
        )
