"""Run by test_train_rank_gradients.py: one rank, or the plain loop that is its reference, with all cases in one process.

python train_rank_program.py FOLDER

A tiny model, and gradients by a plain loop in float64, sample by sample; then the same steps through StepTrainer and DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_splits import FSDP2, grouped_cases, split_of
from ready_seals import ready_seal
from safetensors.torch import save_file
from torch.nn import functional

from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal, SealedGroup
from gcore.system.clock import SystemClock
from gcore.system.torch_imports import leave_compiler_out
from gcore.testing.models import rank_launch
from gcore.train.backends import distributed as meeting_place
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample, remaining_parts
from gcore.types import PromptRef, Version

VOCABULARY, GROUPS, SAMPLES = 64, 3, 3
TEMPERATURES = (0.7, 1.0, 1.3)
BETA1 = 0.9
CASES: dict[str, dict[str, Any]] = {
    "engine": {
        "old_logprobs": "engine",
        "aggregation": "token-mean",
        "kl_coef": 0.3,
        "kl_estimator": "k1",
        "clip_high": 0.28,
    },
    "recompute": {"old_logprobs": "recompute", "aggregation": "seq-mean-token-mean", "advantage": "dr_grpo"},
    "norm": {"old_logprobs": "current", "aggregation": "seq-mean-token-sum-norm", "horizon": 20},
    "tis": {"old_logprobs": "current", "tis_cap": 1.5},
    "rows": {"old_logprobs": "recompute", "packing": "bucketed", "aggregation": "seq-mean-token-mean"},
    "again": {"old_logprobs": "recompute", "packing": "packed", "activation_checkpointing": True},
    "masked": {"old_logprobs": "recompute", "aggregation": "seq-mean-token-mean"},
    "masked-reward": {"old_logprobs": "recompute", "kl_coef": 0.5, "kl_in": "reward"},
    "gspo": {
        "old_logprobs": "engine",
        "loss": "gspo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantage": "rloo",
        "aggregation": "seq-mean-token-mean",
        "entropy_coef": 0.2,
    },
    "cispo": {
        "old_logprobs": "engine",
        "loss": "cispo",
        "advantage": "reinforce_pp_baseline",
        "clip_low": 0.2,
        "clip_high": 0.28,
    },
    "plus": {
        "old_logprobs": "recompute",
        "advantage": "reinforce_pp",
        "gamma": 0.9,
        "kl_coef": 0.5,
        "kl_in": "reward",
        "correction_band": (0.7, 1.4),
    },
    "dual": {
        "old_logprobs": "engine",
        "advantage": "rloo",
        "dual_clip": 1.5,
        "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.1,
    },
    "remax": {
        "old_logprobs": "recompute",
        "advantage": "remax",
        "gamma": 0.9,
        "kl_coef": 0.5,
        "kl_in": "reward",
        "kl_estimator": "k3",
    },
    "mis": {
        "old_logprobs": "recompute",
        "advantage": "dr_grpo",
        "aggregation": "seq-mean-token-mean",
        "correction_band": (0.3, 3.0),
        "kl_coef": 0.2,
        "kl_estimator": "k2",
    },
    "padded": {"old_logprobs": "engine", "aggregation": "seq-mean-token-mean"},
    "sft": {"loss": "sft", "kl_coef": 0.3, "kl_estimator": "k3+", "entropy_coef": 0.1},
}
STAGES = tuple(int(stage) for stage in os.environ.get("STAGES", "1 2 3").split())
"""Of ZeRO, at which two ranks run everything."""
FEW = ("engine", "updates")
"""Cases that are run at every stage; the others one rank runs at stage 2 only, and two at `STAGES`."""
CROSSING: dict[str, list[str]] = json.loads(os.environ.get("CROSSING", "{}"))
"""By stage the cases that two ranks run, and those in parts, `streamed-engine`; empty: all."""
CORRECTIONS = {"tis": "tis", "plus": "icepop", "remax": "decoupled", "mis": "mis", "updates": "decoupled"}
SIZES = {"dual": (2, 3, 3), "mis": (3, 2, 3)}
"""Cases in which groups are of different sizes."""
PADDING = {"padded": 2}
"""Groups that a case's step lacks, and which count in its denominators."""
STREAMED = {
    "engine": ((1, 2), 1),
    "norm": ((2, 1), 0),
    "masked": ((1, 1, 1), 2),
    "masked-reward": ((1, 2), 1),
    "gspo": ((2, 1), 1),
    "remax": ((1, 1, 1), 1),
    "mis": ((1, 2), 1),
    "padded": ((2, 1, 0), 2),
}
"""The same cases once more, in parts: how many groups are in each, and how many parts come before the whole."""
BASELINES = (0.5, 1.0, -0.25)
BUDGETS = {1: 30, 2: 18, 3: 1000, FSDP2: 18}
"""Tokens of a micro-batch, by stage: many pieces, single samples, one piece; the gradient is the same."""
TEN: dict[str, Any] = {"old_logprobs": "engine"}
STEPS = 10
SOME = ((1,), (), (0, 2))
MASKED = dict.fromkeys(("masked", "masked-reward", "plus", "cispo", "mis"), SOME) | {"lonely": ((0, 2), (0, 1, 2), ())}
"""Cases in which samples are masked: which, by group. Of the lonely one's mini-batches the first leaves only one sample
to train on, whatever the number of ranks, and the second none."""
UPDATES: dict[str, Any] = {
    "old_logprobs": "recompute",
    "epochs": 2,
    "mini_batches": GROUPS,
    "learning_rate": 2e-2,
    "schedule": "linear",
    "warmup_updates": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}
"""Many updates from one step, large enough for the clip to matter."""


def spec(folder: Path, case: str, stage: int, **train: Any) -> dict[str, Any]:
    fixed = {
        "learning_rate": 1e-3,
        "micro_batch_tokens": BUDGETS[stage],
        "max_grad_norm": 1e9,
        **split_of(stage),
        "betas": [BETA1, 0.999],
    }
    return {
        "name": "tiny",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {
            "name": case if case in ("remax", "sft") else "grpo",
            "steps": STEPS if case == "ten" else 1,
            "groups_per_step": GROUPS,
            "samples_per_prompt": SAMPLES,
        },
        "rollout": {
            "max_new_tokens": 12,
            "correction": CORRECTIONS.get(case, "none"),
        },
        "train": fixed
        | (TEN if case == "ten" else CASES.get(case, UPDATES))
        | {"packing": "packed"}
        | CASES.get(case, {})
        | train,
    }


def cases_of(cases: Sequence[str], size: int, stage: int, prefix: str = "") -> list[str]:
    """Those of them that so many ranks run at the stage."""
    return [case for case in cases if not CROSSING or size == 1 or prefix + case in CROSSING[str(stage)]]


def make_step() -> tuple[Seal, dict[str, TrainGroup]]:
    """A step whose samples have very different lengths."""
    rng = np.random.default_rng(7)
    sealed, held = [], {}
    for number in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, 2 + 3 * number).astype(np.int32)
        samples = {}
        for index in range(SAMPLES):
            n = int(rng.integers(1, 13))
            logprobs = (-4.2 + rng.normal(0, 0.4, n)).astype(np.float32)
            samples[index] = TrainSample(
                rng.integers(0, VOCABULARY, n).astype(np.int32), logprobs, float(rng.integers(0, 3))
            )
        digest = f"{number:032x}"
        held[digest] = TrainGroup(
            PromptRef(0, number, 0), digest, prompt, samples, TEMPERATURES[number], BASELINES[number]
        )
        sealed.append(
            SealedGroup(
                ref=PromptRef(0, number, 0),
                digest=digest,
                prompt_tokens=len(prompt),
                response_tokens=tuple(len(samples[i].token_ids) for i in range(SAMPLES)),
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    return ready_seal(sealed), held


def make_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    for seed, name in enumerate(("model", "reference")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    (folder / "model" / "tokenizer.json").write_text("{}")


def plain(folder: Path) -> None:
    """A model; and what the definitions say, with autograd and nothing else."""
    from transformers import AutoModelForCausalLM

    make_model(folder)
    plain_updates(folder, "updates")
    plain_updates(folder, "lonely")
    plain_losses(folder)
    for case in CASES:
        model, reference = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
            for name in ("model", "reference")
        )
        loss = plain_loss(case, model, reference) * GROUPS / (GROUPS + PADDING.get(case, 0))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
        save_file(gradients, folder / f"plain-{case}.safetensors")
        (folder / f"plain-{case}.json").write_text(json.dumps(float(loss.detach())))


def distribution(model: Any, group: TrainGroup, sample: TrainSample) -> torch.Tensor:
    """Log-probabilities [response, vocabulary] of one response, without padding."""
    ids = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])[None]
    logits = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1] / group.temperature
    return torch.log_softmax(logits, -1)


def logprobs(model: Any, group: TrainGroup, sample: TrainSample) -> torch.Tensor:
    """Of one response's tokens."""
    return distribution(model, group, sample).gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]


def plain_updates(folder: Path, case: str) -> None:
    """The six updates of `UPDATES`, one after the other, with torch's optimizer; leaves the weights."""
    masked = MASKED.get(case, ((),) * GROUPS)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    decaying = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decaying, betas=(BETA1, 0.999), weight_decay=UPDATES["weight_decay"])
    groups = list(make_step()[1].values())
    with torch.no_grad():
        old = {
            (g, i): logprobs(model, group, group.samples[i]) for g, group in enumerate(groups) for i in range(SAMPLES)
        }
    made = 0
    for number in [*range(GROUPS)] * UPDATES["epochs"]:
        if len(masked[number]) == SAMPLES:
            continue
        group = groups[number]
        rewards = torch.tensor([group.samples[i].reward for i in range(SAMPLES)], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        losses = []
        for i in sorted({*range(SAMPLES)} - {*masked[number]}):
            ratio = (logprobs(model, group, group.samples[i]) - old[number, i]).exp()
            loss = torch.maximum(-advantages[i] * ratio, -advantages[i] * ratio.clamp(0.8, 1.2))
            if CORRECTIONS.get(case) == "decoupled":
                rollout = torch.tensor(group.samples[i].logprobs.tolist(), dtype=torch.float64)
                loss = loss * (old[number, i] - rollout).exp()
            losses.append(loss)
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), UPDATES["max_grad_norm"])
        for one in optimizer.param_groups:
            one["lr"] = UPDATES["learning_rate"] * min((made + 1) / 2, (6 - made) / 4)
        optimizer.step()
        made += 1
    save_file({name: p.detach().float() for name, p in model.named_parameters()}, folder / f"plain-{case}.safetensors")


def plain_losses(folder: Path) -> None:
    """Ten steps of one update each on the same samples, against the engine's log-probabilities; leaves the losses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(BETA1, 0.999), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss("ten", model, None)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        losses.append(float(loss.detach()))
    (folder / "plain-ten.json").write_text(json.dumps(losses))


def plain_loss(case: str, model: Any, reference: Any) -> torch.Tensor:
    """Of the whole step, sample by sample."""
    options, masked, counts = (
        CASES.get(case, TEN),
        MASKED.get(case, ((),) * GROUPS),
        SIZES.get(case, (SAMPLES,) * GROUPS),
    )
    held = list(make_step()[1].values())
    kept = [(g, i) for g in range(GROUPS) for i in range(counts[g]) if i not in masked[g]]
    gains = [plain_gains(options, model, reference, held[g], i, counts[g]) for g, i in kept]
    if options.get("advantage", "").startswith("reinforce_pp"):
        whole = torch.cat(gains)
        gains = [(one - whole.mean()) / (whole.var() + 1e-8).sqrt() for one in gains]
    losses = [
        plain_token_loss(case, model, reference, held[g], held[g].samples[i], gain)
        for (g, i), gain in zip(kept, gains, strict=True)
    ]
    losses = [one for one in losses if len(one)]
    match options.get("aggregation", "token-mean"):
        case "token-mean":
            return torch.cat(losses).mean()
        case "seq-mean-token-mean":
            return torch.stack([one.mean() for one in losses]).mean()
        case "seq-mean-token-sum":
            return torch.stack([one.sum() for one in losses]).mean()
        case "seq-mean-token-sum-norm":
            return torch.stack([one.sum() / options["horizon"] for one in losses]).mean()
    raise AssertionError(options)


def plain_gains(
    options: dict[str, Any], model: Any, reference: Any, group: TrainGroup, index: int, size: int
) -> torch.Tensor:
    """Of every token of a response, before whitening; the group has `size` samples."""

    def penalties(sample: TrainSample) -> torch.Tensor:
        if options.get("kl_in") != "reward":
            return torch.zeros(len(sample.token_ids), dtype=torch.float64)
        with torch.no_grad():
            apart = logprobs(model, group, sample) - logprobs(reference, group, sample)
        return options["kl_coef"] * plain_kl(apart, options.get("kl_estimator", "k1"))

    own = group.samples[index]
    n, kind = len(own.token_ids), options.get("advantage", "grpo")
    if kind in ("reinforce_pp", "remax"):
        rewards = -penalties(own)
        rewards[-1] += own.reward
        powers = options["gamma"] ** torch.arange(n, dtype=torch.float64)
        returns = torch.stack([(rewards[t:] * powers[: n - t]).sum() for t in range(n)])
        return returns if group.baseline is None or kind == "reinforce_pp" else returns - group.baseline
    outcomes = torch.tensor(
        [group.samples[i].reward - float(penalties(group.samples[i]).sum()) for i in range(size)], dtype=torch.float64
    )
    if kind == "rloo":
        return ((size * outcomes[index] - outcomes.sum()) / (size - 1)).expand(n)
    gain = outcomes[index] - outcomes.mean()
    return (gain / (outcomes.std() + 1e-6) if kind == "grpo" else gain).expand(n)


def plain_kl(apart: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "k1":
            return apart
        case "k2":
            return apart**2 / 2
        case "k3":
            return (-apart).exp() - 1 + apart
        case _:  # the value of k3, the gradient of k2
            return ((-apart).exp() - 1 + apart).detach() + apart.detach() * (apart - apart.detach())


def plain_token_loss(
    case: str, model: Any, reference: Any, group: TrainGroup, sample: TrainSample, advantage: torch.Tensor
) -> torch.Tensor:
    """Of a response's tokens; those that the correction leaves out are not there."""
    options, correction = CASES.get(case, TEN), CORRECTIONS.get(case, "none")
    everything = distribution(model, group, sample)
    own = everything.gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
    rollout = torch.tensor(sample.logprobs.tolist(), dtype=torch.float64)
    old = rollout if options.get("old_logprobs") == "engine" else own.detach()
    ratio = (own - old).exp()
    low, high = 0.8, 1 + options.get("clip_high", 0.2)
    if options.get("loss") == "gspo":
        ratio = (own - old).mean().exp().detach() * (own - own.detach()).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    if "dual_clip" in options:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * options["dual_clip"]), loss)
    if options.get("loss") == "cispo":
        loss = -ratio.detach().clamp(low, high) * advantage * own
    if options.get("loss") == "sft":
        loss = -own
    weight = (old - rollout).exp()
    first, last = options.get("correction_band", (0.0, 1e9))
    inside = (weight >= first) & (weight <= last)
    match correction:
        case "tis":
            loss = loss * weight.clamp(max=options["tis_cap"])
        case "icepop":
            loss = torch.where(inside, loss * weight, 0.0)
        case "decoupled":
            loss = loss * weight
    if options.get("entropy_coef"):
        loss = loss + options["entropy_coef"] * (everything.exp() * everything).sum(-1)
    if options.get("kl_in", "loss") == "loss" and options.get("kl_coef"):
        apart = own - logprobs(reference, group, sample).detach()
        loss = loss + options["kl_coef"] * plain_kl(apart, options.get("kl_estimator", "k3"))
    return loss[inside] if correction == "mis" else loss


def run(
    folder: Path, plain: Callable[[Path], None], rank: Callable[[Path, int, int], None], sizes: Sequence[int] = (1, 2)
) -> None:
    """Run the plain loop and worlds of these sizes, which may use the output of those before, each in a process forked after all imports.

    Imports are most of the cost of such a process. There are no threads before the fork. Like every rank, they start without
    torch's compiler.
    """
    leave_compiler_out()
    from transformers import Qwen3ForCausalLM  # noqa: F401

    import gcore.train.backends.deepspeed
    import gcore.train.backends.fsdp2
    import gcore.train.models
    import gcore.train.rank.main
    import gcore.train.step  # noqa: F401

    warnings.filterwarnings("ignore")
    gc.collect()
    gc.freeze()  # ZeRO 3 collects garbage at each start, and what was imported is none
    torch.set_num_threads(1)
    for together in (
        [partial(plain, folder)],
        *([partial(rank, folder, n, size) for n in range(size)] for size in sizes),
    ):
        processes = [multiprocessing.get_context("fork").Process(target=one, daemon=True) for one in together]
        for process in processes:
            process.start()
        waiting = {process.sentinel: process for process in processes}
        while waiting:
            for sentinel in multiprocessing.connection.wait(list(waiting)):
                ended = waiting.pop(int(sentinel))  # type: ignore[call-overload]
                ended.join()
                if ended.exitcode != 0:
                    sys.exit(f"{ended.name} ended with {ended.exitcode}")


def join(folder: Path, rank: int, size: int) -> meeting_place.Collective:
    """The world of `size` ranks that meet in `folder`."""
    meeting = meeting_place.Rendezvous(rank, size, "127.0.0.1")
    address = folder / f"address-{size}"
    if rank == 0:
        opened = meeting_place.open_store(meeting)
        store = opened.store
        address.with_suffix(".part").write_text(opened.address)
        address.with_suffix(".part").rename(address)
    else:
        clock = SystemClock()
        began = clock.monotonic()
        while not address.exists():
            assert clock.monotonic() - began < 100
            threading.Event().wait(0.02)
        store = meeting_place.find_store(address.read_text(), meeting)
    return meeting_place.Collective.join(meeting, store)


def rank_process(folder: Path, rank: int, size: int) -> None:
    """Every case, two ranks at every stage, and some cases four ranks; leaves checkpoints, whose exp_avg is (1 - beta1) times the gradient."""
    from gcore.train.backends.base import TrainBackend
    from gcore.train.backends.packed_attention import NAME
    from gcore.train.checkpoint.run_files import BackgroundWriter
    from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, UpdateCounts
    from gcore.train.hf_models import load_module
    from gcore.train.models import RankModels, Reference, load_models
    from gcore.train.step import StepTrainer

    world = join(folder, rank, size)
    group = world.form_sequence_groups(2 if size == 4 else 1)
    seal, held = make_step()

    def trainer(name: str, spec_: dict[str, Any]) -> StepTrainer:
        gc.freeze()  # what the trainers before have left, too
        launch = rank_launch(spec_, folder / f"{name}-{size}", rank=rank, world_size=size)
        train = launch.spec.train
        models = load_models(launch, world.device, world.max, lambda: None, group=group)
        if models.reference is not None:  # of another model than the policy's, or the KL would be 0
            other: Any = load_module(folder / "reference", torch.float32)
            if train.packing == "packed":
                other.set_attn_implementation(NAME)
            models = RankModels(models.policy, Reference(other, train, models.policy.feeding))
        if name.startswith(("recompute-", "half-")):
            made_policies[name] = models.policy
        saver = CheckpointWriter(launch, models.policy)
        writers.append(saver.writer)
        publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, world.max)
        return StepTrainer(launch, world, models, saver, publisher, SystemClock(), UpdateCounts(0, 0))

    def sealed(case: str, mini_batches: int) -> StepInput:
        masked = MASKED.get(case, ((),) * GROUPS)
        counts = SIZES.get(case, (SAMPLES,) * GROUPS)
        groups = tuple(
            g.model_copy(update={"masked": m, "response_tokens": g.response_tokens[:n]})
            for g, m, n in zip(seal.groups, masked, counts, strict=True)
        )
        more = {"world_size": size, "mini_batches": mini_batches, "groups": groups, "padding": PADDING.get(case, 0)}
        cut = seal.model_copy(update=more | {"sequence_parallel": group.size})
        return StepInput(cut, balance_samples(cut), rank, held)

    def streamed(case: str, stage: int, **more: Any) -> None:
        parts, before = STREAMED.get(case, ((1, 2), 1))
        of = "recompute" if case == "half" else case
        name = f"streamed-{case}-{stage}"
        work = sealed(of, 1)
        cut = work.seal.model_copy(update={"parts": parts, "ready_parts": len(parts)})
        work = dataclasses.replace(work, seal=cut, layout=balance_samples(cut))
        one = trainer(name, spec(folder, of, stage, stream=True, sequence_parallel=group.size, **more))
        begun = max(0, before - rank)  # some ranks get a part only with the whole step
        for part in list(remaining_parts(work))[:begun]:
            one.accumulate(part, lambda phase: None)
        result = one.run(dataclasses.replace(work, begun=begun), lambda phase: None)
        (folder / f"{name}-{size}" / f"metrics-{rank}.json").write_text(json.dumps(dict(result.metrics)))

    def whole_step(case: str, stage: int) -> None:
        work = sealed(case, GROUPS if case in ("updates", "lonely") else 1)
        one = trainer(f"{case}-{stage}", spec(folder, case, stage, sequence_parallel=group.size))
        result = one.run(work, lambda phase: None)
        (folder / f"{case}-{stage}-{size}" / f"metrics-{rank}.json").write_text(json.dumps(dict(result.metrics)))

    writers: list[BackgroundWriter] = []
    made_policies: dict[str, TrainBackend] = {}
    for stage in STAGES if size == 4 else ():
        for case in grouped_cases(stage, few=bool(CROSSING)):
            if case.startswith("streamed-"):
                streamed(case.removeprefix("streamed-"), stage)
            else:
                whole_step(case, stage)
    for stage in (1, 2, 3, FSDP2) if size < 4 else ():
        whole = stage in STAGES if size > 1 else stage == 2
        if stage == FSDP2:
            assert "torch._inductor" not in sys.modules, "DeepSpeed has loaded the compiler"
            if not whole:
                continue
        for case in cases_of([*CASES, "updates", "lonely"], size, stage) if whole else FEW:
            whole_step(case, stage)
        if not whole:
            continue
        for case in cases_of([*STREAMED, "half"], size, stage, "streamed-"):
            streamed(case, stage, **({"dtype": "bf16"} if case == "half" else {}))
        nothing = seal.model_copy(update={"world_size": size, "groups": (), "last": True})
        result = trainer(f"empty-{stage}", spec(folder, "engine", stage)).run(
            StepInput(nothing, balance_samples(nothing), rank, {}), lambda phase: None
        )
        (folder / f"empty-{stage}-{size}" / f"metrics-{rank}.json").write_text(json.dumps(dict(result.metrics)))
        work = sealed("engine", 1)
        trainer(f"still-{stage}", spec(folder, "engine", stage, learning_rate=0.0, epochs=2)).run(
            work, lambda phase: None
        )
        trainer(f"half-{stage}", spec(folder, "recompute", stage, dtype="bf16")).run(work, lambda phase: None)
        rotary = [one for _, one in made_policies[f"half-{stage}"].module.named_buffers()]
        assert {one.dtype for one in rotary} == {torch.float32}, "frequencies are no good in half precision"
        skips(made_policies[f"recompute-{stage}"])
        ten = trainer(f"ten-{stage}", spec(folder, "ten", stage))
        losses = []
        for step in range(1, STEPS + 1):
            work = sealed("ten", 1)
            seal_now = work.seal.model_copy(update={"step": step})
            losses.append(ten.run(dataclasses.replace(work, seal=seal_now), lambda phase: None).metrics["loss"])
        (folder / f"ten-{stage}-{size}" / "losses.json").write_text(json.dumps(losses))
    written(writers)
    world.leave()
    sys.stdout.flush()
    os._exit(0)


def written(writers: Iterable[Any]) -> None:
    """Checkpoints go to the disk beside the steps; they are read by others after this."""
    for writer in writers:
        assert writer.wait(60)
        assert writer.writing is None or not writer.writing.error


def skips(policy: Any) -> None:
    """A gradient that is not a number changes nothing; the next one counts again."""
    from gcore.train.batching import make_dummy

    inputs = make_dummy(policy.feeding).inputs

    def weights() -> list[torch.Tensor]:
        return [one.tensor.clone() for one in policy.tensors("served")]

    before = weights()
    policy.backward(policy.outputs_of(inputs).float().sum() * float("nan"), last=True)
    assert not policy.update(1e-3).applied
    assert all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    policy.backward(functional.softplus(policy.outputs_of(inputs).float()).mean(), last=True)
    assert policy.update(1e-3).applied
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))


if __name__ == "__main__":
    if sys.argv[1] == "model":  # the model alone, for tests of whole ranks
        make_model(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[1]), plain, rank_process, (1, 2, 4))
