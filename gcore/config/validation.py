"""Which estimators, losses and corrections go together: one sentence for what contradicts itself, or would do nothing.

Pure. What a single setting may be stands at its field; what needs a flow, a model or data is found where those are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gcore.config.data import eval_sets, eval_sources, training_sources
from gcore.config.rollout import EnvironmentSpec
from gcore.config.train import _of_correction
from gcore.errors import did_you_mean

if TYPE_CHECKING:
    from gcore.config.data import ResolvedSource
    from gcore.config.rollout import RolloutSpec
    from gcore.config.spec import JobSpec
    from gcore.config.train import FlowSpec, TrainSpec


def refuse_environment(environment: EnvironmentSpec | None, max_new_tokens: int, max_length: int | None) -> str | None:
    """Why responses cannot have several turns like that, if they cannot."""
    if environment is None:
        return None
    if environment.max_tokens is not None and environment.max_tokens < max_new_tokens:
        return (
            f"environment.max_tokens ({environment.max_tokens}) counts what is shown too, and is below "
            f"rollout.max_new_tokens ({max_new_tokens}), what the model alone may make"
        )
    room = environment.room(max_new_tokens)
    if max_length is not None and room >= max_length:
        return (
            f"a response of up to {room} tokens with what it is shown (environment.max_tokens) leaves no room for a prompt "
            f"in model.max_length ({max_length})"
        )
    return None


SAMPLING = ("grpo", "dapo", "ppo", "rloo", "reinforce_pp")
"""gcore's own flows that find no baseline. Of a flow of the user's own only its groups tell (`gcore.flows.fit`)."""


SAYS_NOTHING = "tools"
"""gcore's own environment, which says of no response what it is worth."""


def refuse_correction(rollout: RolloutSpec, train: TrainSpec) -> str | None:
    """Why `rollout.correction` cannot be had with the section `train`, if it cannot."""
    return next(_of_correction(rollout.correction, train), None)


def refuse_stale(rollout: RolloutSpec, train: TrainSpec) -> str | None:
    """Why tokens of older weights cannot be trained so, if they cannot."""
    if rollout.staleness == 0 or rollout.correction != "none" or train.old_logprobs == "engine" or train.loss == "sft":
        return None
    return (
        f"rollout.staleness is {rollout.staleness}, and nothing corrects for tokens that older weights made; set "
        "rollout.correction: tis, icepop, mis or decoupled, or train.old_logprobs: engine"
    )


def refuse_flow(flow: FlowSpec, train: TrainSpec) -> str | None:
    """Why what one of gcore's own flows makes cannot be trained so, if it cannot."""
    if train.loss == "sft":
        return None
    if flow.name == "sft":
        return f"flow 'sft' shows answers that no engine drew, so train.loss must be sft, not {train.loss}"
    if train.advantage == "remax" and flow.name in SAMPLING:
        return f"train.advantage 'remax' holds rewards against a baseline, which flow {flow.name!r} does not find; set flow.name: remax"
    return None


def refuse_streamed(rollout: RolloutSpec, train: TrainSpec, groups: int) -> str | None:
    """Why steps of so many groups cannot be trained part by part, or would come whole, if so."""
    if not train.stream:
        return None
    if rollout.staleness > 0:
        return (
            "train.stream trains a step's first groups while its last ones are still generated; with rollout.staleness "
            f"{rollout.staleness} those of the next step are generated meanwhile, so nothing is gained: leave one of the two out"
        )
    if train.stream_min is not None and train.stream_min >= groups:
        return (
            f"train.stream_min is {train.stream_min} and a step has {groups} groups (flow.groups_per_step), so that each would "
            "come whole: lower it, or leave train.stream out"
        )
    return None


def refuse_source(source: ResolvedSource, rollout: RolloutSpec) -> str | None:
    """What a source draws that cannot be trained as `rollout` says, if anything; the sentence begins behind its name."""
    own = source.sampling
    allows = f"allows {own.max_new_tokens} new tokens"
    if (own.top_p < 1 or own.top_k is not None or own.min_p > 0) and rollout.correction == "none":
        return "truncates what is sampled (top_p, top_k or min_p); set rollout.correction: tis"
    if own.max_new_tokens < rollout.min_new_tokens:
        return f"{allows}, fewer than rollout.min_new_tokens ({rollout.min_new_tokens})"
    if rollout.overlong_tokens is not None and own.max_new_tokens < rollout.overlong_tokens:
        return f"{allows}, fewer than rollout.overlong_tokens ({rollout.overlong_tokens})"
    if own.max_new_tokens > rollout.max_new_tokens:
        return f"{allows}, more than rollout.max_new_tokens ({rollout.max_new_tokens})"
    return None


def named_rewards(spec: JobSpec) -> frozenset[str]:
    """Every reward that any section of the spec names: as a reward, a part of one, or what scores instead of a judge."""
    rewards = [spec.reward, *(s.reward for s in (*spec.data.sources, *spec.eval.sources) if s.reward is not None)]
    named = {name for reward in rewards for name in (reward.name, *(part.name for part in reward.parts))}
    instead = {judge.on_error.fallback for judge in spec.judges if not isinstance(judge.on_error, str)}
    return frozenset(name for name in named | instead if name is not None)


def refuse_pairs(spec: JobSpec) -> str | None:
    """Which judge is to compare the responses of groups of one, if one is."""
    alone = {judge.name for judge in spec.judges if judge.mode == "pairwise" and isinstance(judge.on_error, str)}
    groups = [
        (f"flow.samples_per_prompt is {spec.flow.samples_per_prompt}", spec.flow.samples_per_prompt, source.reward)
        for source in training_sources(spec)
    ]
    groups += [
        (f"samples of eval source {held.source.name!r} is {held.draws.samples}", held.draws.samples, held.source.reward)
        for held in eval_sets(spec)
    ]
    for where, samples, reward in groups:
        if samples < 2 and (judge := next((name for name in reward.judges if name in alone), None)):
            return (
                f"judge {judge!r} compares the responses to one prompt (mode: pairwise), and {where}; use at least 2, or another "
                "reward there"
            )
    return None


def refuse_judges(spec: JobSpec) -> str | None:
    """Which judge is named and not there, is there twice, or is there for nothing, if one is."""
    names = [judge.name for judge in spec.judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"two judges have the same name ({twice[0]!r})"
    rewards = [("reward", spec.reward)]
    rewards += [(f"reward of source {one.name!r}", one.reward) for one in spec.data.sources if one.reward is not None]
    rewards += [(f"reward of set {one.name!r}", one.reward) for one in spec.eval.sources if one.reward is not None]
    for where, reward in rewards:
        for judge in reward.judges:
            if judge not in names:
                there = f"there are {', '.join(names)}" if names else "the spec has no judges"
                return f"{where} names judge {judge!r}, which is not in judges{did_you_mean(judge, names)} ({there})"
    used = {judge for _, reward in rewards for judge in reward.judges}
    if idle := [name for name in names if name not in used]:
        return f"judge {idle[0]!r} is named by no reward; leave it out, or write reward.judge: {idle[0]}"
    return None


def refuse_environment_reward(spec: JobSpec) -> str | None:
    """Why no reward can come from the environment, or none be asked of it, if so."""
    named = named_rewards(spec)
    if "environment" in named and spec.environment is None:
        return "reward 'environment' hands on what the environment says, and the spec has no section environment"
    if "environment" in named and spec.environment is not None and spec.environment.name == SAYS_NOTHING:
        return (
            f"reward 'environment' hands on what the environment says, and the environment {SAYS_NOTHING!r} says no reward; take another "
            "reward, such as numeric, or an environment of your own"
        )
    if spec.environment is not None and spec.train.loss == "sft":
        return "train.loss: sft shows answers that nobody drew, so there are no turns for an environment; leave one of them out"
    return None


def refuse_turns(spec: JobSpec) -> str | None:
    """Why engines and ranks cannot take turns in the memory of their slots, if they are to and cannot."""
    if spec.placement.memory != "in_turns":
        return None
    if spec.placement.policy == "static":
        return "placement.memory: in_turns is for slots that engines and ranks share, and with policy: static they share none"
    if spec.rollout.staleness > 0:
        return (
            f"placement.memory: in_turns takes the engines' memory while ranks train, and with rollout.staleness "
            f"{spec.rollout.staleness} they generate meanwhile; leave one of the two out"
        )
    if spec.train.stream:
        return (
            "placement.memory: in_turns takes the ranks' memory while engines generate, and with train.stream they train "
            "meanwhile; leave one of the two out"
        )
    return None


def refuse_placement(spec: JobSpec) -> str | None:
    """Why the pools cannot have the slots that `placement` gives them, if they cannot."""
    placed, serving = spec.placement, spec.served_judges
    if placed.is_live:
        return next(_of_live_placement(spec), None)
    if placed.policy != "static":
        return None
    if spec.train.ranks not in (None, placed.train):
        return f"train.ranks ({spec.train.ranks}) is not placement.train ({placed.train}); leave train.ranks out"
    if serving and placed.reward is None:
        return f"judge {serving[0].name!r} is served by the cluster, and placement.reward gives judges no slots"
    if not serving and placed.reward is not None:
        return "placement.reward gives slots to judges, and the cluster serves none; leave it out"
    for judge in serving:
        wanted, spans = judge.serving.replicas, judge.serving.slots_per_engine
        if wanted is not None and wanted * spans > (placed.reward or 0):
            engines = f"{wanted} engines" if spans == 1 else f"{wanted} engines of {spans} slots"
            return f"judge {judge.name!r} wants {engines}, and placement.reward is {placed.reward}"
    return None


def _of_live_placement(spec: JobSpec) -> Iterator[str]:
    """What of a placement that moves slots cannot be, or would do nothing."""
    placed, serving = spec.placement, spec.served_judges
    if placed.train is not None and spec.train.ranks not in (None, placed.train):
        yield f"train.ranks ({spec.train.ranks}) is not placement.train ({placed.train}); leave one of them out"
    if serving and placed.train is not None and placed.reward is None:
        yield f"judge {serving[0].name!r} is served by the cluster, and placement gives train its slots and judges none; give reward too"
    if not serving and placed.reward is not None:
        yield "placement.reward gives slots to judges, and the cluster serves none; leave it out"
    if not serving and placed.lend:
        yield "placement.lend lends slots between rollout and judges, and the cluster serves no judge; leave it out"
    for judge in serving:
        if judge.serving.replicas is not None:
            yield (
                f"judge {judge.name!r} wants {judge.serving.replicas} engines (serving.replicas), and with policy: {placed.policy} "
                "it has as many as the policy gives it; leave replicas out"
            )


def refuse_agent(spec: JobSpec) -> str | None:
    """Why responses cannot be made by an agent like that, if they cannot."""
    named = named_rewards(spec)
    agent, longest, context = spec.agent, spec.rollout.max_new_tokens, spec.model.max_length
    if agent is None:
        return (
            "reward 'agent' hands on what the agent says, and the spec has no section agent" * ("agent" in named)
            or None
        )
    if spec.environment is not None:
        return (
            "a response is made by an agent or with an environment; leave out one of the sections agent and environment"
        )
    if spec.train.loss == "sft":
        return "train.loss: sft shows answers that nobody drew, so there is nothing for an agent to ask; leave one of them out"
    if agent.max_tokens is not None and agent.max_tokens < longest:
        return (
            f"agent.max_tokens ({agent.max_tokens}) counts what is shown too, and is below rollout.max_new_tokens ({longest}), "
            "what the model alone may make"
        )
    if context is not None and agent.room(longest) >= context:
        return (
            f"a response of up to {agent.room(longest)} tokens with what it is shown (agent.max_tokens) leaves no room for a "
            f"question in model.max_length ({context})"
        )
    for source in (*training_sources(spec), *eval_sources(spec)):
        if not source.chat:
            return (
                f"an agent speaks in messages, and source {source.name!r} is plain text; set model.chat: true, with a template of "
                "your own in the source's `template` where the model has none"
            )
    return None


# -------------------- spanning
# Engines that span several slots (`slots_per_engine`): which sizes in a spec do not go together.
#
# What nodes and models allow is not known here (`controllers.service.spanning`), nor on which slots engines lie (`placement.replicas`).


def refuse_spans(spec: JobSpec) -> str | None:
    """Why the sizes of engines do not go together, or with the sizes of pools; None: they do."""
    sizes = {judge.serving.slots_per_engine: judge.name for judge in spec.served_judges}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        return (
            f"judge {sizes[first]!r} has engines of {first} slots (serving.slots_per_engine) and judge {sizes[second]!r} of {second}; "
            "judges share the slots of their pool, so give them the same"
        )
    rollout, reward = spec.rollout.slots_per_engine, next(iter(sizes), 1)
    if max(rollout, reward) % min(rollout, reward):
        return (
            f"rollout.slots_per_engine is {rollout} and the judges' is {reward}; what one pool gives the other must be whole engines "
            "of both, so use sizes of which one divides the other"
        )
    placed = spec.placement.reward
    if placed is not None and placed % reward:
        return f"placement.reward is {placed}, and a judge's engine spans {reward} slots; use a multiple of that"
    return None
