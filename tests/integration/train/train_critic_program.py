"""Run by test_train_critic.py: PPO with a critic, through the trainer and by a plain loop, all cases in one process.

python train_critic_program.py FOLDER

The models are tiny. The plain loop follows the definitions in float64, sample by sample. The same steps then run through StepTrainer and
DeepSpeed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rank_splits import split_of
from safetensors.torch import load_file, save_file
from train_rank_program import GROUPS, SAMPLES, STAGES, VOCABULARY, join, logprobs, make_model, make_step, run, written

from gcore.ledger.balance import balance_samples
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample

BETA1 = 0.9
SOME = ((1,), (), (0, 2))
NOBODY: tuple[tuple[int, ...], ...] = ((),) * GROUPS
GAE: dict[str, Any] = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "packing": "packed"}
CASES: dict[str, dict[str, Any]] = {
    "values": GAE | {"critic": {"path": "judge"}},
    "reward": GAE
    | {"critic": {"path": "judge"}, "kl_coef": 0.5, "kl_in": "reward", "aggregation": "seq-mean-token-mean"},
    "rows": GAE
    | {
        "critic": {"path": "judge", "clip": None},
        "packing": "bucketed",
        "activation_checkpointing": True,
        "gae_lambda": 1.0,
    },
    "updates": GAE
    | {
        "critic": {"path": "judge", "learning_rate": 1e-2, "clip": 0.05, "max_grad_norm": 0.3, "weight_decay": 0.1},
        "epochs": 2,
        "mini_batches": GROUPS,
        "learning_rate": 5e-3,
        "max_grad_norm": 0.5,
    },
    "fresh": GAE
    | {
        "critic": {"learning_rate": 1e-2},
        "epochs": 2,
        "mini_batches": GROUPS,
        "learning_rate": 5e-3,
        "max_grad_norm": 0.5,
    },
}
"""By which the policy's and the critic's gradients, or weights after six updates, are compared."""
ONCE = ("rows", "fresh")
"""Cases that two ranks run at stage 3 only."""
MASKED = {"reward": SOME, "rows": SOME}
STEPS = 3
RESUMED: dict[str, Any] = CASES["updates"] | {"schedule": "linear", "warmup_updates": 4}


def spec(folder: Path, case: dict[str, Any], stage: int, steps: int = 1) -> dict[str, Any]:
    fixed = {"learning_rate": 1e-3, "micro_batch_tokens": 30, "max_grad_norm": 1e9, "betas": [BETA1, 0.999]}
    critic = {"max_grad_norm": 1e9} | case.get("critic", {})
    if "path" in critic:
        critic["path"] = str(folder / critic["path"])
    return {
        "name": "tiny",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {"steps": steps, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 12},
        "train": fixed | case | {"critic": critic, **split_of(stage)},
        "checkpoint": {"every": 1},
    }


def make_models(folder: Path) -> None:
    """The policy and its reference; and a narrower, deeper model of rewards, whose head has no bias."""
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    make_model(folder)
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        initializer_range=0.2,
        num_labels=1,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "judge")
    assert "score.weight" in load_file(folder / "judge" / "model.safetensors")
    (folder / "judge" / "tokenizer.json").write_text("{}")


# The plain loop -------------------------------------------------------------------------------------------------------


class PlainCritic:
    """A backbone and a head, in float64."""

    def __init__(self, folder: Path, path: str | None) -> None:
        from transformers import AutoModel

        source = folder / (path or "model")
        self.backbone = AutoModel.from_pretrained(source, dtype=torch.float64).eval()
        width = self.backbone.config.hidden_size
        head = load_file(source / "model.safetensors").get("score.weight", torch.zeros(1, width))
        self.weight = head.double().requires_grad_()
        self.bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self.backbone.named_parameters():
            yield f"model.{name}", one
        yield "score.weight", self.weight
        yield "score.bias", self.bias

    def values(self, group: TrainGroup, sample: TrainSample) -> torch.Tensor:
        """Of the text before each token: one text after the other, so that no later token can be seen."""
        ids = [*group.prompt_ids.tolist(), *sample.token_ids.tolist()]
        return torch.cat([self.last_values(ids[:end], 1) for end in range(len(group.prompt_ids), len(ids))])

    def values_at_once(self, group: TrainGroup, sample: TrainSample) -> torch.Tensor:
        """The same, quicker."""
        ids = [*group.prompt_ids.tolist(), *sample.token_ids.tolist()]
        return self.last_values(ids[:-1], len(sample.token_ids))

    def last_values(self, ids: list[int], count: int) -> torch.Tensor:
        hidden = self.backbone(input_ids=torch.tensor(ids)[None]).last_hidden_state[0, -count:]
        return hidden @ self.weight[0] + self.bias[0]


def plain(folder: Path) -> None:
    make_models(folder)
    for case, options in CASES.items():
        plain_case(folder, case, options)


def plain_case(folder: Path, case: str, options: dict[str, Any]) -> None:
    """One step's updates; leaves gradients of the first update, weights after the last, and numbers."""
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
        for name in ("model", "reference")
    )
    own = options["critic"]
    critic = PlainCritic(folder, own.get("path"))
    groups = list(make_step()[1].values())
    masked = MASKED.get(case, NOBODY)
    kept = [(g, i) for g in range(GROUPS) for i in range(SAMPLES) if i not in masked[g]]
    pair = {(g, i): (groups[g], groups[g].samples[i]) for g, i in kept}
    old, values, gains, returns = {}, {}, {}, {}
    with torch.no_grad():
        for place, one in pair.items():
            old[place], values[place] = logprobs(policy, *one), critic.values(*one)
            rewards = torch.zeros_like(old[place])
            rewards[-1] = one[1].reward
            if options.get("kl_in") == "reward":
                rewards -= options["kl_coef"] * (old[place] - logprobs(reference, *one))
            n = len(rewards)
            ahead = torch.cat([values[place][1:], torch.zeros(1, dtype=torch.float64)])
            delta = rewards + options["gamma"] * ahead - values[place]
            fade = (options["gamma"] * options["gae_lambda"]) ** torch.arange(n, dtype=torch.float64)
            gains[place] = torch.stack([(delta[t:] * fade[: n - t]).sum() for t in range(n)])
            returns[place] = gains[place] + values[place]
    every = torch.cat(list(gains.values()))
    white = {place: (one - every.mean()) / (every.var() + 1e-8).sqrt() for place, one in gains.items()}
    goals = torch.cat(list(returns.values()))
    numbers: dict[str, Any] = {
        "value_mean": float(torch.cat(list(values.values())).mean()),
        "return_mean": float(goals.mean()),
        "value_explained_variance": float(1 - every.var() / goals.var()),
        "advantage_mean": float(every.mean()),
        "advantage_std": float(every.std()),
    }
    models = {"policy": dict(policy.named_parameters()), "critic": dict(critic.named_parameters())}
    optimizers = {
        "policy": adam(models["policy"], 0.0, options.get("learning_rate", 1e-3)),
        "critic": adam(models["critic"], own.get("weight_decay", 0.0), own.get("learning_rate", 1e-5)),
    }
    norms = {"policy": options.get("max_grad_norm", 1e9), "critic": own.get("max_grad_norm", 1e9)}
    losses: dict[str, list[float]] = {"policy": [], "critic": []}
    parts = options.get("mini_batches", 1)
    apart: list[list[float]] = []
    for _ in range(options.get("epochs", 1)):
        for part in range(parts):
            places = [place for place in kept if parts == 1 or place[0] == part]
            tokens = sum(len(old[place]) for place in places)
            apart.append([])
            totals = {"policy": torch.zeros((), dtype=torch.float64), "critic": torch.zeros((), dtype=torch.float64)}
            for place in places:
                ratio = (logprobs(policy, *pair[place]) - old[place]).exp()
                apart[-1] += (ratio - 1).abs().tolist()
                loss = torch.maximum(-white[place] * ratio, -white[place] * ratio.clamp(0.8, 1.2))
                now = critic.values_at_once(*pair[place])
                off = (now - returns[place]) ** 2
                if (clip := own.get("clip", 0.2)) is not None:
                    near = torch.minimum(torch.maximum(now, values[place] - clip), values[place] + clip)
                    off = torch.maximum(off, (near - returns[place]) ** 2)
                for name, one in (("policy", loss), ("critic", 0.5 * off)):
                    if options.get("aggregation") == "seq-mean-token-mean":
                        totals[name] = totals[name] + one.mean() / len(places)
                    else:
                        totals[name] = totals[name] + one.sum() / tokens
            for name, total in totals.items():
                optimizers[name].zero_grad()
                total.backward()
                if not losses[name]:
                    first = {key: p.grad.float().clone() for key, p in models[name].items() if p.grad is not None}
                    save_file(first, folder / f"plain-{case}-{name}-gradient.safetensors")
                torch.nn.utils.clip_grad_norm_(models[name].values(), norms[name])
                optimizers[name].step()
                losses[name].append(float(total.detach()))
    for name, parameters in models.items():
        found = {key: p.detach().float() for key, p in parameters.items()}
        save_file(found, folder / f"plain-{case}-{name}.safetensors")
    numbers |= {"loss": sum(losses["policy"]) / len(losses["policy"])}
    numbers |= {"value_loss": sum(losses["critic"]) / len(losses["critic"])}
    together = [one for update in apart for one in update]
    numbers |= {"ratio_deviation": sum(together) / len(together)}
    numbers |= {"ratio_deviation_last": sum(apart[-1]) / len(apart[-1])}
    (folder / f"plain-{case}.json").write_text(json.dumps(numbers))


def adam(parameters: dict[str, torch.Tensor], decay: float, rate: float) -> torch.optim.Optimizer:
    every = list(parameters.values())
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(BETA1, 0.999))


# The ranks ------------------------------------------------------------------------------------------------------------


class Rank:
    """One rank's trainers, all of the same world."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.world = join(folder, rank, size)
        self.group = self.world.form_sequence_groups(2 if size == 4 else 1)
        self.seal, self.held = make_step()
        self.writers: list[Any] = []

    def trainer(self, run: Path, tree: dict[str, Any], start: dict[str, Any] | None = None) -> Any:
        """As `gcore.train.rank.main` makes one, but for the reference, which is another model than the policy."""
        gc.freeze()  # what the trainers before have left, too
        from gcore.train.backends.packed_attention import NAME
        from gcore.train.checkpoint.writer import (
            CheckpointWriter,
            FolderPublisher,
            UpdateCounts,
            restore_critic,
            restore_optimizer,
        )
        from gcore.train.hf_models import load_module
        from gcore.train.models import RankModels, Reference, load_models
        from gcore.train.rank.main import _manifest
        from gcore.train.step import StepTrainer

        launch = rank_launch(tree, run, rank=self.rank, world_size=self.size, start=start)
        manifest = _manifest(launch, lambda _: None)
        models = load_models(launch, self.world.device, self.world.max, lambda: None, group=self.group)
        progress = UpdateCounts(0, 0)
        if manifest is not None and launch.checkpoint_path is not None:
            restore_optimizer(models.policy, launch.checkpoint_path, manifest)
            restore_critic(models.critic, launch.checkpoint_path, manifest)
            progress = UpdateCounts.of(manifest)
        if models.reference is not None:
            other: Any = load_module(self.folder / "reference", torch.float32)
            if launch.spec.train.packing == "packed":
                other.set_attn_implementation(NAME)
            models = RankModels(
                models.policy, Reference(other, launch.spec.train, models.policy.feeding), models.critic
            )
        saver = CheckpointWriter(launch, models.policy, models.critic)
        self.writers.append(saver.writer)
        publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, self.world.max)
        return StepTrainer(launch, self.world, models, saver, publisher, SystemClock(), progress)

    def work(self, case: str, mini_batches: int, step: int = 1) -> StepInput:
        masked = MASKED.get(case, NOBODY)
        groups = tuple(g.model_copy(update={"masked": m}) for g, m in zip(self.seal.groups, masked, strict=True))
        more = {"world_size": self.size, "mini_batches": mini_batches, "groups": groups, "step": step}
        seal = self.seal.model_copy(update=more | {"sequence_parallel": self.group.size})
        return StepInput(seal, balance_samples(seal), self.rank, self.held)

    def cases(self, stage: int) -> None:
        for case, options in CASES.items():
            if self.size == 4 and case != "fresh":
                continue
            options = options | {"sequence_parallel": self.group.size}
            if case in ONCE and self.size > 1 and stage != 3:
                continue
            run = self.folder / f"{case}-{stage}-{self.size}"
            trainer = self.trainer(run, spec(self.folder, options, stage))
            result = trainer.run(self.work(case, options.get("mini_batches", 1)), lambda phase: None)
            (run / f"metrics-{self.rank}.json").write_text(json.dumps(dict(result.metrics)))

    def steps(self, run: Path, tree: dict[str, Any], first: int = 1, start: dict[str, Any] | None = None) -> None:
        trainer = self.trainer(run, tree, start)
        for step in range(first, STEPS + 1):
            result = trainer.run(self.work("updates", GROUPS, step), lambda phase: None)
            name = "straight" if first == 1 else "resumed"
            (run / f"{name}-{step}.json").write_text(json.dumps(dict(result.metrics)))

    def resumes(self, stage: int) -> None:
        """Three steps on one rank; and again the last two of them from its first checkpoint: of another stage or world."""
        source = self.folder / "straight"
        if self.size == 1:
            self.steps(source, spec(self.folder, RESUMED, stage, STEPS))
        again = self.folder / f"resumed-{stage}-{self.size}"
        written(self.writers)
        if self.rank == 0:
            (again / "checkpoints").mkdir(parents=True)
            (again / "checkpoints" / "0-1").symlink_to(source / "checkpoints" / "0-1")
        self.world.max([0.0])  # rank 0 has written
        start = {"step": 1, "checkpoint": "checkpoints/0-1"}
        other = stage if self.size > 1 else 3
        self.steps(again, spec(self.folder, RESUMED, other, STEPS), 2, start)

    def warms_up(self, stage: int) -> None:
        """A step in which the critic alone is trained, and one in which both are."""
        run = self.folder / f"warm-{stage}-{self.size}"
        options = CASES["updates"] | {"critic": CASES["updates"]["critic"] | {"warmup_steps": 1}}
        trainer = self.trainer(run, spec(self.folder, options, stage, 2))
        for step in (1, 2):
            result = trainer.run(self.work("updates", GROUPS, step), lambda phase: None)
            (run / f"metrics-{step}.json").write_text(json.dumps(dict(result.metrics)))

    def half(self, stage: int) -> None:
        run = self.folder / f"half-{stage}-{self.size}"
        trainer = self.trainer(run, spec(self.folder, CASES["values"] | {"dtype": "bf16"}, stage))
        critic = trainer._critique.critic
        step = self.work("values", 1)
        from gcore.train.batching import cut_step
        from gcore.train.critic import values_of

        batch = cut_step(step, trainer._train, critic.feeding).batches[0][0]
        values = values_of(critic, batch)
        assert values.dtype == torch.float32
        seen = values[batch.scored]
        assert not torch.equal(seen.bfloat16().float(), seen), "the head rounds"
        trainer.run(step, lambda phase: None)


def rank_process(folder: Path, rank: int, size: int) -> None:
    one = Rank(folder, rank, size)
    for stage in STAGES if size > 1 else (2,):
        one.cases(stage)
        if size == 4:  # in sequence groups of two
            continue
        one.resumes(stage)
        one.warms_up(stage)
        if size > 1:
            one.half(stage)
    written(one.writers)
    one.world.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run(Path(sys.argv[1]), plain, rank_process, (1, 2, 4) if "GCORE_ALL_STAGES" in os.environ else (1, 2))
