"""Checks across the sections of a job spec: each yields a sentence for what contradicts itself, or would do nothing.

What a single section says of itself is checked where it is defined; what needs a flow, a model or data is checked where
those are known. The checks take sections; `gcore.config.spec` lists them in order and reports the first sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gcore.config.data import ONLY_SOURCE, EvalSet, EvalSpec, ResolvedSource
from gcore.config.placement import PlacementSpec
from gcore.config.reward import JudgeSpec, RewardSpec
from gcore.config.rollout import AgentSpec, EnvironmentSpec, RolloutSpec
from gcore.config.train import FlowSpec, TrainSpec
from gcore.errors import did_you_mean

SAMPLING = ("grpo", "dapo", "ppo", "rloo", "reinforce_pp")
"""gcore's own flows that find no baseline. Of a flow of the user's own only its groups tell (`gcore.flows.filters`)."""

SAYS_NOTHING = "tools"
"""gcore's own environment, which says of no response what it is worth."""

Rewards = Sequence[tuple[str, RewardSpec]]
"""Every section `reward` of a spec, each with its place in the spec."""


def check_tracking(trackers: Sequence[str], copies: int | None) -> Iterator[str]:
    """Each tracker once, and none where the run's folder is on several nodes."""
    if twice := sorted({name for name in trackers if trackers.count(name) > 1}):
        yield f"tracking names {twice[0]!r} twice; a tracker takes the numbers once"
    if trackers and copies is not None:
        yield (
            f"tracking names {trackers[0]!r}, and how far a tracker has got stands on one node only; with storage.copies leave "
            "tracking out: metrics.jsonl lies on every node"
        )


def check_flow(flow: FlowSpec, train: TrainSpec) -> Iterator[str]:
    """What one of gcore's own flows makes can be trained so."""
    if train.loss == "sft":
        return
    if flow.name == "sft":
        yield f"flow 'sft' shows answers that no engine drew, so train.loss must be sft, not {train.loss}"
    if train.advantage == "remax" and flow.name in SAMPLING:
        yield f"train.advantage 'remax' holds rewards against a baseline, which flow {flow.name!r} does not find; set flow.name: remax"


def check_groups(flow: FlowSpec, train: TrainSpec) -> Iterator[str]:
    """Groups have enough samples for the estimator, and steps enough groups for their mini-batches."""
    if flow.samples_per_prompt < 2 and train.compares_group:
        yield (
            f"flow.samples_per_prompt is {flow.samples_per_prompt}, and train.advantage {train.advantage!r} "
            "compares the samples of a group; use at least 2"
        )
    if train.mini_batches > flow.groups_per_step:
        yield (
            f"train.mini_batches ({train.mini_batches}) is more than flow.groups_per_step "
            f"({flow.groups_per_step}); a mini-batch holds at least one group"
        )


def check_correction(correction: str, train: TrainSpec) -> Iterator[str]:
    """`rollout.correction` has something to correct."""
    if correction == "none":
        return
    if train.loss == "sft":
        yield f"rollout.correction {correction!r} weighs what an engine sampled, and train.loss: sft trains on no samples"
    if train.old_logprobs == "engine":
        yield (
            f"rollout.correction {correction!r} compares the trainer's log-probabilities with the engine's, and with "
            "train.old_logprobs: engine they are the same; set old_logprobs: recompute"
        )
    if train.old_logprobs == "current" and correction in ("mis", "decoupled"):
        why = {
            "mis": "leaves tokens out of the count, which must be known before an update",
            "decoupled": "clips around the policy that the step begins with",
        }[correction]
        yield f"rollout.correction {correction!r} {why}; set train.old_logprobs: recompute"


def check_stale(rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Tokens of older weights are corrected for."""
    if rollout.staleness == 0 or rollout.correction != "none" or train.old_logprobs == "engine" or train.loss == "sft":
        return
    yield (
        f"rollout.staleness is {rollout.staleness}, and nothing corrects for tokens that older weights made; set "
        "rollout.correction: tis, icepop, mis or decoupled, or train.old_logprobs: engine"
    )


def check_streamed(rollout: RolloutSpec, train: TrainSpec, groups: int) -> Iterator[str]:
    """A step of so many groups gains something from being trained part by part."""
    if not train.stream:
        return
    if rollout.staleness > 0:
        yield (
            "train.stream trains a step's first groups while its last ones are still generated; with rollout.staleness "
            f"{rollout.staleness} those of the next step are generated meanwhile, so nothing is gained: leave one of the two out"
        )
    if train.stream_min is not None and train.stream_min >= groups:
        yield (
            f"train.stream_min is {train.stream_min} and a step has {groups} groups (flow.groups_per_step), so that each would "
            "come whole: lower it, or leave train.stream out"
        )


def check_judges(judges: Sequence[JudgeSpec], rewards: Rewards) -> Iterator[str]:
    """Each judge has a name of its own, every judge that a reward names exists, and every judge is named."""
    names = [judge.name for judge in judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two judges have the same name ({twice[0]!r})"
    for where, reward in rewards:
        for judge in reward.judges:
            if judge not in names:
                there = f"there are {', '.join(names)}" if names else "the spec has no judges"
                yield f"{where} names judge {judge!r}, which is not in judges{did_you_mean(judge, names)} ({there})"
    used = {judge for _, reward in rewards for judge in reward.judges}
    if idle := [name for name in names if name not in used]:
        yield f"judge {idle[0]!r} is named by no reward; leave it out, or write reward.judge: {idle[0]}"


def check_placement(placed: PlacementSpec, ranks: int | None, serving: Sequence[JudgeSpec]) -> Iterator[str]:
    """The pools can have the slots that `placement` gives them. `serving`: the judges that the cluster serves."""
    if placed.policy == "colocated":
        return
    if placed.train is not None and ranks not in (None, placed.train):
        leave = "one of them" if placed.is_live else "train.ranks"
        yield f"train.ranks ({ranks}) is not placement.train ({placed.train}); leave {leave} out"
    if serving and placed.train is not None and placed.reward is None:
        yield (
            f"judge {serving[0].name!r} is served by the cluster, and placement gives train its slots and judges none; give reward too"
            if placed.is_live
            else f"judge {serving[0].name!r} is served by the cluster, and placement.reward gives judges no slots"
        )
    if not serving and placed.reward is not None:
        yield "placement.reward gives slots to judges, and the cluster serves none; leave it out"
    if not serving and placed.lend:
        yield "placement.lend lends slots between rollout and judges, and the cluster serves no judge; leave it out"
    for judge in serving:
        wanted, spans = judge.serving.replicas, judge.serving.slots_per_engine
        if wanted is None:
            continue
        if placed.is_live:
            yield (
                f"judge {judge.name!r} wants {wanted} engines (serving.replicas), and with policy: {placed.policy} "
                "it has as many as the policy gives it; leave replicas out"
            )
        elif wanted * spans > (placed.reward or 0):
            engines = f"{wanted} engines" if spans == 1 else f"{wanted} engines of {spans} slots"
            yield f"judge {judge.name!r} wants {engines}, and placement.reward is {placed.reward}"


def check_engine_sizes(rollout: RolloutSpec, serving: Sequence[JudgeSpec], reward_slots: int | None) -> Iterator[str]:
    """The sizes of engines (`slots_per_engine`) go together, and with the judges' slots.

    What nodes and models allow is checked by the controllers, where engines are placed by `placement.assign`.
    """
    sizes = {judge.serving.slots_per_engine: judge.name for judge in serving}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        yield (
            f"judge {sizes[first]!r} has engines of {first} slots (serving.slots_per_engine) and judge {sizes[second]!r} of {second}; "
            "judges share the slots of their pool, so give them the same"
        )
    spanned, reward = rollout.slots_per_engine, next(iter(sizes), 1)
    if max(spanned, reward) % min(spanned, reward):
        yield (
            f"rollout.slots_per_engine is {spanned} and the judges' is {reward}; what one pool gives the other must be whole engines "
            "of both, so use sizes of which one divides the other"
        )
    if reward_slots is not None and reward_slots % reward:
        yield f"placement.reward is {reward_slots}, and a judge's engine spans {reward} slots; use a multiple of that"


def check_turns(placed: PlacementSpec, rollout: RolloutSpec, train: TrainSpec) -> Iterator[str]:
    """Engines and ranks that take turns in the memory of their slots share slots, and do not work at the same time."""
    if placed.memory != "in_turns":
        return
    if placed.policy == "static":
        yield "placement.memory: in_turns is for slots that engines and ranks share, and with policy: static they share none"
    if rollout.staleness > 0:
        yield (
            f"placement.memory: in_turns takes the engines' memory while ranks train, and with rollout.staleness "
            f"{rollout.staleness} they generate meanwhile; leave one of the two out"
        )
    if train.stream:
        yield (
            "placement.memory: in_turns takes the ranks' memory while engines generate, and with train.stream they train "
            "meanwhile; leave one of the two out"
        )


def reward_names(rewards: Rewards, judges: Sequence[JudgeSpec]) -> frozenset[str]:
    """Every reward function that a spec names: as a reward, a part of one, or what scores instead of a judge."""
    named = {name for _, reward in rewards for name in (reward.name, *(part.name for part in reward.parts))}
    instead = {judge.on_error.fallback for judge in judges if not isinstance(judge.on_error, str)}
    return frozenset(name for name in named | instead if name is not None)


def check_environment(
    environment: EnvironmentSpec | None, named: Collection[str], train: TrainSpec, longest: int, context: int | None
) -> Iterator[str]:
    """Rewards come from the environment where one is asked, and its responses fit into the model's context.

    `named`: the rewards that the spec names. `longest`: rollout.max_new_tokens. `context`: model.max_length.
    """
    if "environment" in named and environment is None:
        yield "reward 'environment' hands on what the environment says, and the spec has no section environment"
    if environment is None:
        return
    if "environment" in named and environment.name == SAYS_NOTHING:
        yield (
            f"reward 'environment' hands on what the environment says, and the environment {SAYS_NOTHING!r} says no reward; take another "
            "reward, such as numeric, or an environment of your own"
        )
    if train.loss == "sft":
        yield "train.loss: sft shows answers that nobody drew, so there are no turns for an environment; leave one of them out"
    if environment.max_tokens is not None and environment.max_tokens < longest:
        yield (
            f"environment.max_tokens ({environment.max_tokens}) counts what is shown too, and is below "
            f"rollout.max_new_tokens ({longest}), what the model alone may make"
        )
    room = environment.room(longest)
    if context is not None and room >= context:
        yield (
            f"a response of up to {room} tokens with what it is shown (environment.max_tokens) leaves no room for a prompt "
            f"in model.max_length ({context})"
        )


def check_agent(
    agent: AgentSpec | None,
    environment: EnvironmentSpec | None,
    named: Collection[str],
    train: TrainSpec,
    longest: int,
    context: int | None,
) -> Iterator[str]:
    """An agent can make the responses; arguments as of `check_environment`."""
    if agent is None:
        if "agent" in named:
            yield "reward 'agent' hands on what the agent says, and the spec has no section agent"
        return
    if environment is not None:
        yield "a response is made by an agent or with an environment; leave out one of the sections agent and environment"
    if train.loss == "sft":
        yield "train.loss: sft shows answers that nobody drew, so there is nothing for an agent to ask; leave one of them out"
    if agent.max_tokens is not None and agent.max_tokens < longest:
        yield (
            f"agent.max_tokens ({agent.max_tokens}) counts what is shown too, and is below rollout.max_new_tokens ({longest}), "
            "what the model alone may make"
        )
    if context is not None and agent.room(longest) >= context:
        yield (
            f"a response of up to {agent.room(longest)} tokens with what it is shown (agent.max_tokens) leaves no room for a "
            f"question in model.max_length ({context})"
        )


def check_chat(agent: AgentSpec | None, sources: Sequence[ResolvedSource]) -> Iterator[str]:
    """An agent's prompts are chat messages, in training and in evaluation."""
    for source in sources:
        if agent is not None and not source.chat:
            yield (
                f"an agent speaks in messages, and source {source.name!r} is plain text; set model.chat: true, with a template of "
                "your own in the source's `template` where the model has none"
            )


def check_pairs(
    judges: Sequence[JudgeSpec], flow: FlowSpec, sources: Sequence[ResolvedSource], sets: Sequence[EvalSet]
) -> Iterator[str]:
    """A judge that compares responses has groups of at least two."""
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
                f"judge {judge!r} compares the responses to one prompt (mode: pairwise), and {where}; use at least 2, or another "
                "reward there"
            )


def check_warmup(train: TrainSpec, steps: int | None) -> Iterator[str]:
    """The critic's own steps leave some of the job's steps to the policy."""
    if train.critic is not None and steps is not None and train.critic.warmup_steps >= steps:
        yield f"train.critic.warmup_steps ({train.critic.warmup_steps}) leaves none of flow.steps ({steps}) to the policy"


def check_truncation(sources: Sequence[ResolvedSource]) -> Iterator[str]:
    """Training samples from the whole distribution. Only new jobs are checked; stored ones continue."""
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
    """What each source draws can be trained as `rollout` says, and each held-out set's answers can be long enough."""
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
    """The metric by which the best checkpoint is told is measured."""
    if best is not None and (why := section.refuse_metric(best)) is not None:
        yield f"checkpoint.{why}"


def check_context(longest: int, context: int | None) -> Iterator[str]:
    """The longest response leaves room for a prompt."""
    if context is not None and longest >= context:
        yield f"rollout.max_new_tokens ({longest}) leaves no room for a prompt in model.max_length ({context})"
