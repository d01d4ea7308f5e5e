"""Checks across the sections of a job spec. Each check yields a sentence for a contradiction or an option without effect.

A section checks its own fields where it is defined; checks that need a flow, a model or data happen where those are loaded.
`gcore.config.spec` lists the checks in order and reports the first sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gcore.config.capabilities import BACKENDS, ENGINES, lacking
from gcore.config.data import ONLY_SOURCE, EvalSet, EvalSpec, ResolvedSource
from gcore.config.placement import PlacementSpec
from gcore.config.reward import JudgeSpec, RewardSpec
from gcore.config.rollout import AgentSpec, EnvironmentSpec, RolloutSpec
from gcore.config.train import OUTPUT_LAYER, FlowSpec, TrainSpec, multiples_near
from gcore.errors import did_you_mean

SAMPLING = ("grpo", "dapo", "ppo", "rloo", "reinforce_pp")
"""Built-in flows whose groups have no baseline reward, which `train.advantage: remax` needs. For other flows, the controller checks each group
(`gcore.flows.filters`)."""

SAYS_NOTHING = "tools"
"""Built-in environment that returns no reward."""

Rewards = Sequence[tuple[str, RewardSpec]]
"""All `reward` sections of a spec, each with its location."""


def check_tracking(trackers: Sequence[str], copies: int | None) -> Iterator[str]:
    """Reject duplicate trackers, and trackers in a run whose folder is copied between nodes."""
    if twice := sorted({name for name in trackers if trackers.count(name) > 1}):
        yield f"tracking lists {twice[0]!r} twice; list it once"
    if trackers and copies is not None:
        yield (
            f"tracking lists {trackers[0]!r}, but storage.copies is set, and a tracker's progress is stored on one node only; leave "
            "tracking out and read metrics.jsonl, which every node has"
        )


def check_flow(flow: FlowSpec, train: TrainSpec) -> Iterator[str]:
    """Check that a built-in flow fits the loss and the estimator."""
    if train.loss == "sft":
        return
    if flow.name == "sft":
        yield f"flow 'sft' uses given answers that no engine sampled, so train.loss must be sft, not {train.loss}"
    if train.advantage == "remax" and flow.name in SAMPLING:
        yield f"train.advantage 'remax' needs a baseline, which flow {flow.name!r} does not provide; set flow.name: remax"


def check_judge_adapters(judges: Sequence[str], rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Check that the policy's engines can serve the adapters of these judges, and that their base does not change."""
    if not judges:
        return
    setting = {f"the adapter of judge {judges[0]!r}": ("judge_adapters", True)}
    yield from lacking(ENGINES, "rollout.engine", rollout.engine, setting)
    if train.lora is None or train.lora.publish != "adapter":
        yield (
            f"judge {judges[0]!r} is an adapter of the policy's model, but training changes the weights that engines serve; set "
            "train.lora with publish: adapter, or give the judge a model"
        )
    elif any(target.rpartition(".")[2] == OUTPUT_LAYER for target in train.lora.targets):
        yield (
            f"judge {judges[0]!r} is an adapter of the policy's model, and engines with such judges cannot adapt the output layer "
            f"({OUTPUT_LAYER}); leave it out of train.lora.targets, or give the judge a model"
        )


def check_published_adapters(rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Check that the engine loads adapters alone if the job publishes them alone."""
    alone = train.lora is not None and train.lora.publish == "adapter"
    yield from lacking(ENGINES, "rollout.engine", rollout.engine, {"train.lora.publish: adapter": ("adapters", alone)})


def check_pictures(
    wanted: bool,
    environment: EnvironmentSpec | None,
    agent: AgentSpec | None,
    rollout: RolloutSpec,
    train: TrainSpec,
) -> Iterator[str]:
    """Check that the engine and the settings support prompts with pictures."""
    if not wanted:
        return
    needs = {
        "data.images": ("pictures", True),
        "an environment together with data.images": ("turn_pictures", environment is not None),
    }
    yield from lacking(ENGINES, "rollout.engine", rollout.engine, needs)
    unfit = {
        "agent": agent is not None,
        "train.critic": train.critic is not None,
        "train.sequence_parallel": train.sequence_parallel > 1,
        "train.lora": train.lora is not None,
    }
    for name, used in unfit.items():
        if used:
            yield f"data.images is set, and {name} does not support pictures yet; leave one of them out"


def check_tool_pictures(sources: Sequence[ResolvedSource], environment: EnvironmentSpec | None) -> Iterator[str]:
    """Check that every prompt goes to a model that sees, if tools return pictures. `sources`: of training and evaluation."""
    without = [one.name for one in sources if one.images is None]
    if environment is not None and environment.tools.max_pictures and without:
        yield (
            f"environment.tools.max_pictures is {environment.tools.max_pictures}, but {', '.join(dict.fromkeys(without))} has no "
            "field of pictures; set data.images, or set max_pictures to 0"
        )


def check_seeing_judges(wanted: bool, judges: Sequence[JudgeSpec]) -> Iterator[str]:
    """Check that there are pictures for judges that see them. `wanted`: whether any prompt has pictures."""
    for number, judge in enumerate(judges):
        if judge.images and not wanted:
            yield (
                f"judges.{number}.images is set, but the prompts have no pictures; set data.images, or leave "
                f"judges.{number}.images out"
            )


def check_groups(flow: FlowSpec, train: TrainSpec) -> Iterator[str]:
    """Check that groups have enough samples for the estimator, and steps enough groups for their mini-batches."""
    if flow.samples_per_prompt < 2 and train.compares_group:
        yield (
            f"flow.samples_per_prompt is {flow.samples_per_prompt}, but train.advantage {train.advantage!r} "
            "compares the samples of a group; use at least 2"
        )
    if train.mini_batches > flow.groups_per_step:
        yield (
            f"train.mini_batches ({train.mini_batches}) is more than flow.groups_per_step "
            f"({flow.groups_per_step}), but a mini-batch needs at least one group; lower it"
        )


def check_correction(correction: str, train: TrainSpec) -> Iterator[str]:
    """Check that `rollout.correction` has something to correct."""
    if correction == "none":
        return
    if train.loss == "sft":
        yield f"rollout.correction {correction!r} corrects sampled tokens, but train.loss: sft trains on no samples; leave it out"
    if train.old_logprobs == "engine":
        yield (
            f"rollout.correction {correction!r} compares the trainer's log-probabilities with the engine's, but with "
            "train.old_logprobs: engine they are the same; set old_logprobs: recompute"
        )
    if train.old_logprobs == "current" and correction in ("mis", "decoupled"):
        why = {
            "mis": "excludes tokens from the denominator, which must be known before an update",
            "decoupled": "clips around the policy at the start of the step",
        }[correction]
        yield f"rollout.correction {correction!r} {why}; set train.old_logprobs: recompute"


def check_stale(rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Check that, with `rollout.staleness` above 0, the loss corrects for tokens that older weights generated."""
    if rollout.staleness == 0 or rollout.correction != "none" or train.old_logprobs == "engine" or train.loss == "sft":
        return
    yield (
        f"rollout.staleness is {rollout.staleness}, but nothing corrects for tokens from older weights; set "
        "rollout.correction: tis, icepop, mis or decoupled, or train.old_logprobs: engine"
    )


def check_streamed(rollout: RolloutSpec, train: TrainSpec, groups: int) -> Iterator[str]:
    """Check that streamed training can start before a step's `groups` groups are all finished, and that engines wait for it (staleness 0)."""
    if not train.stream:
        return
    if rollout.staleness > 0:
        yield (
            "train.stream trains a step's first groups while its last ones are generated, but with rollout.staleness "
            f"{rollout.staleness} the engines already generate during training; leave one of the two out"
        )
    if train.stream_min is not None and train.stream_min >= groups:
        yield (
            f"train.stream_min is {train.stream_min}, but a step has {groups} groups (flow.groups_per_step), so no part of a step "
            "could start early; lower stream_min, or leave train.stream out"
        )


def check_judges(judges: Sequence[JudgeSpec], rewards: Rewards) -> Iterator[str]:
    """Check that judges have different names, that rewards name existing judges, and that every judge is used."""
    names = [judge.name for judge in judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two judges have the same name ({twice[0]!r}); rename one"
    for where, reward in rewards:
        for judge in reward.judges:
            if judge not in names:
                there = f"there are {', '.join(names)}" if names else "the spec has no judges"
                yield f"{where} names judge {judge!r}, which is not in judges{did_you_mean(judge, names)} ({there})"
    used = {judge for _, reward in rewards for judge in reward.judges}
    if idle := [name for name in names if name not in used]:
        yield f"judge {idle[0]!r} is not used by any reward; leave it out, or set reward.judge: {idle[0]}"


def check_placement(placed: PlacementSpec, train: TrainSpec, serving: Sequence[JudgeSpec]) -> Iterator[str]:
    """Check that `placement` gives every pool the slots it needs. `serving`: the judges that the cluster serves."""
    if placed.policy == "colocated":
        return
    ranks, together = train.ranks, train.sequence_parallel
    if placed.train is not None and (fix := multiples_near(placed.train, together)):
        yield f"placement.train ({placed.train}) must be a multiple of train.sequence_parallel ({together}); set it to {fix}"
    if placed.train is not None and ranks not in (None, placed.train):
        leave = "one of them" if placed.is_live else "train.ranks"
        yield f"train.ranks ({ranks}) differs from placement.train ({placed.train}); leave {leave} out"
    if serving and placed.train is not None and placed.reward is None:
        yield (
            f"the cluster serves judge {serving[0].name!r}, but placement.train is set without placement.reward; set both"
            if placed.is_live
            else f"the cluster serves judge {serving[0].name!r}, but placement.reward gives judges no slots; set placement.reward"
        )
    if not serving and placed.reward is not None:
        yield "placement.reward gives slots to judges, but the cluster serves no judge; leave it out"
    if not serving and placed.lend:
        yield "placement.lend reassigns slots between rollout and judges, but the cluster serves no judge; leave it out"
    for judge in serving:
        wanted, spans = judge.serving.replicas, judge.serving.slots_per_engine
        if wanted is None:
            continue
        if placed.is_live:
            yield (
                f"judge {judge.name!r} asks for {wanted} engines (serving.replicas), but policy: {placed.policy} decides "
                "the number of engines; leave replicas out"
            )
        elif wanted * spans > (placed.reward or 0):
            engines = f"{wanted} engines" if spans == 1 else f"{wanted} engines of {spans} slots"
            yield f"judge {judge.name!r} needs {engines} (serving.replicas), but placement.reward is {placed.reward}; raise it"


def check_engine_sizes(rollout: RolloutSpec, serving: Sequence[JudgeSpec], reward_slots: int | None) -> Iterator[str]:
    """Check that engine sizes (`slots_per_engine`) are compatible with each other and with the judges' slots.

    Controllers check what nodes and models allow when `placement.assign` places engines.
    """
    sizes = {judge.serving.slots_per_engine: judge.name for judge in serving}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        yield (
            f"judge {sizes[first]!r} has engines of {first} slots (serving.slots_per_engine) and judge {sizes[second]!r} of {second}, "
            "but judges share the slots of their pool; use one size"
        )
    spanned, reward = rollout.slots_per_engine, next(iter(sizes), 1)
    if max(spanned, reward) % min(spanned, reward):
        yield (
            f"rollout.slots_per_engine is {spanned} and the judges' is {reward}, but pools exchange whole engines; "
            "use sizes of which one divides the other"
        )
    if reward_slots is not None and reward_slots % reward:
        yield f"placement.reward is {reward_slots}, but a judge's engine uses {reward} slots; use a multiple of {reward}"


def check_turns(placed: PlacementSpec, rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Check that engines and ranks with `memory: in_turns` share slots and do not run at the same time."""
    if placed.memory != "in_turns":
        return
    setting = "placement.memory: in_turns"
    yield from lacking(ENGINES, "rollout.engine", rollout.engine, {setting: ("sleeps_on", True)})
    yield from lacking(BACKENDS, "train.backend", train.backend, {setting: ("rest", True)})
    if placed.policy == "static":
        yield "placement.memory: in_turns is for slots that engines and ranks share, but policy: static shares none; leave memory out"
    if rollout.staleness > 0:
        yield (
            f"placement.memory: in_turns releases the engines' memory while ranks train, but with rollout.staleness "
            f"{rollout.staleness} engines generate at that time; leave one of the two out"
        )
    if train.stream:
        yield (
            "placement.memory: in_turns releases the ranks' memory while engines generate, but with train.stream ranks train "
            "at that time; leave one of the two out"
        )


def reward_names(rewards: Rewards, judges: Sequence[JudgeSpec]) -> frozenset[str]:
    """Return the reward functions that a spec names: as a reward, as a part of one, or as a judge's fallback."""
    named = {name for _, reward in rewards for name in (reward.name, *(part.name for part in reward.parts))}
    instead = {judge.on_error.fallback for judge in judges if not isinstance(judge.on_error, str)}
    return frozenset(name for name in named | instead if name is not None)


def check_environment(
    environment: EnvironmentSpec | None, named: Collection[str], train: TrainSpec, longest: int, context: int | None
) -> Iterator[str]:
    """Check that rewards that need an environment have one, and that its responses fit into the model's context.

    `named`: the rewards that the spec names. `longest`: rollout.max_new_tokens. `context`: model.max_length.
    """
    if "environment" in named and environment is None:
        yield "reward 'environment' returns the environment's reward, but the spec has no section environment; add it"
    if environment is None:
        return
    if "environment" in named and environment.name == SAYS_NOTHING:
        yield (
            f"reward 'environment' returns the environment's reward, but environment {SAYS_NOTHING!r} gives none; use another "
            "reward, such as numeric, or an environment of your own"
        )
    if train.loss == "sft":
        yield "train.loss: sft uses given answers without turns, so it cannot use an environment; leave one of them out"
    if environment.max_tokens is not None and environment.max_tokens < longest:
        yield (
            f"environment.max_tokens ({environment.max_tokens}) is below rollout.max_new_tokens ({longest}), but it also counts "
            "the environment's text; raise it"
        )
    room = environment.room(longest)
    if context is not None and room >= context:
        yield (
            f"a response of up to {room} tokens (environment.max_tokens) leaves no room for a prompt "
            f"in model.max_length ({context}); lower environment.max_tokens"
        )


def check_agent(
    agent: AgentSpec | None,
    environment: EnvironmentSpec | None,
    named: Collection[str],
    train: TrainSpec,
    longest: int,
    context: int | None,
) -> Iterator[str]:
    """Check that an agent can produce the responses. Arguments as in `check_environment`."""
    if agent is None:
        if "agent" in named:
            yield "reward 'agent' returns the agent's reward, but the spec has no section agent; add it"
        return
    if environment is not None:
        yield "the spec has both sections agent and environment, but a response needs one of them; leave one out"
    if train.loss == "sft":
        yield "train.loss: sft uses given answers, so it cannot use an agent; leave one of them out"
    if agent.max_tokens is not None and agent.max_tokens < longest:
        yield (
            f"agent.max_tokens ({agent.max_tokens}) is below rollout.max_new_tokens ({longest}), but it also counts the agent's "
            "text; raise it"
        )
    if context is not None and agent.room(longest) >= context:
        yield (
            f"a response of up to {agent.room(longest)} tokens (agent.max_tokens) leaves no room for a "
            f"prompt in model.max_length ({context}); lower agent.max_tokens"
        )


def check_chat(agent: AgentSpec | None, sources: Sequence[ResolvedSource]) -> Iterator[str]:
    """Check that an agent's prompts are chat messages, in training and in evaluation."""
    for source in sources:
        if agent is not None and not source.chat:
            yield (
                f"an agent needs chat messages, but source {source.name!r} is plain text; set model.chat: true, and a chat template "
                "in the source's `template` if the model has none"
            )


def check_pairs(
    judges: Sequence[JudgeSpec], flow: FlowSpec, sources: Sequence[ResolvedSource], sets: Sequence[EvalSet]
) -> Iterator[str]:
    """Check that a judge that compares responses has groups of at least two."""
    alone = {judge.name for judge in judges if judge.mode == "pairwise" and isinstance(judge.on_error, str)}
    samples = flow.samples_per_prompt
    groups = [(f"flow.samples_per_prompt is {samples}", samples, source.reward) for source in sources]
    groups += [
        (f"samples of eval source {held.source.name!r} is {held.draws.samples}", held.draws.samples, held.source.reward)
        for held in sets
    ]
    for where, samples, reward in groups:
        if samples < 2 and (judge := next((name for name in reward.judges if name in alone), None)):
            yield (
                f"judge {judge!r} compares the responses to one prompt (mode: pairwise), but {where}; use at least 2, or another "
                "reward there"
            )


def check_warmup(train: TrainSpec, steps: int | None) -> Iterator[str]:
    """Check that the critic's warm-up leaves steps for the policy."""
    if train.critic is not None and steps is not None and train.critic.warmup_steps >= steps:
        yield f"train.critic.warmup_steps ({train.critic.warmup_steps}) leaves none of flow.steps ({steps}) for the policy; lower it"


def check_truncation(sources: Sequence[ResolvedSource]) -> Iterator[str]:
    """Check that no source truncates the sampling distribution (top_p, top_k, min_p). Applies to new jobs only; stored jobs continue."""
    for source in sources:
        own = source.sampling
        set_ = {"top_p": own.top_p, "top_k": own.top_k, "min_p": own.min_p}
        neutral = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
        cutting = ", ".join(f"{name}: {value}" for name, value in set_.items() if value != neutral[name])
        if cutting:
            whose = "rollout" if source.name == ONLY_SOURCE else f"source {source.name!r}"
            yield (
                f"{whose} sets {cutting}, which training does not support: no importance weight restores the tokens that truncation "
                "removed, so rollout.correction does not help; remove top_p, top_k and min_p (evaluation may use eval.top_p)"
            )


def check_sources(rollout: RolloutSpec, sources: Sequence[ResolvedSource], sets: Sequence[EvalSet]) -> Iterator[str]:
    """Check the response lengths of each source and held-out set against `rollout`."""
    for source in sources:
        own = source.sampling
        allows = f"source {source.name!r} allows {own.max_new_tokens} new tokens"
        if own.max_new_tokens < rollout.min_new_tokens:
            yield f"{allows}, fewer than rollout.min_new_tokens ({rollout.min_new_tokens})"
        if rollout.overlong_tokens is not None and own.max_new_tokens < rollout.overlong_tokens:
            yield f"{allows}, fewer than rollout.overlong_tokens ({rollout.overlong_tokens})"
        if own.max_new_tokens > rollout.max_new_tokens:
            yield f"{allows}, more than rollout.max_new_tokens ({rollout.max_new_tokens})"
    for held in sets:
        if (longest := held.source.sampling.max_new_tokens) < rollout.min_new_tokens:
            yield (
                f"eval source {held.source.name!r} allows {longest} new tokens, fewer than "
                f"rollout.min_new_tokens ({rollout.min_new_tokens})"
            )


def check_best(best: str | None, section: EvalSpec) -> Iterator[str]:
    """Check that the metric that selects the best checkpoint is measured."""
    if best is not None and (why := section.refuse_metric(best)) is not None:
        yield f"checkpoint.{why}"


def check_context(longest: int, context: int | None) -> Iterator[str]:
    """Check that the longest response leaves room for a prompt."""
    if context is not None and longest >= context:
        yield f"rollout.max_new_tokens ({longest}) leaves no room for a prompt in model.max_length ({context}); lower it"
