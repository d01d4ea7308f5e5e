"""A step's numbers by source: in the log entry, in metrics and in the API's answers."""

from __future__ import annotations

from dataclasses import replace

from controllers.api.job_messages import best_checkpoint, source_reports
from controllers.telemetry.gauges import show_job
from controllers.telemetry.step_stats import (
    drop_reward_stats,
    drop_token_stats,
    source_key,
    source_stats,
    split_source_key,
    truncated_share,
    truncated_sources,
)
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints, EndedRef, SealedGroup
from gcore.ledger.records.job import Evaluation, JobRecord, SourceScore
from gcore.ledger.statistics import add_to_tally
from gcore.ledger.transactions import Versioned
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.types import PromptRef, Version

KEYS = JobKeys("u")


def group(source: str, reward: float, lengths: tuple[int, ...], truncated: int, seq: int = 0) -> SealedGroup:
    return SealedGroup(
        ref=PromptRef(0, 0, seq),
        digest="d",
        prompt_tokens=1,
        response_tokens=lengths,
        versions=(Version(0, 0),),
        reward=reward,
        source=source,
        truncated=truncated,
        holder="a",
    )


GROUPS = (group("sums", 0.5, (2, 4), 1), group("sums", 1.0, (2, 2), 0), group("words", 0.25, (8, 8), 2))
OUTCOMES = (
    EndedRef(ref=PromptRef(0, 0, 3), kind="filtered", source="words"),
    EndedRef(ref=PromptRef(0, 0, 4), kind="filtered", source="words"),
    EndedRef(ref=PromptRef(0, 0, 5), kind="failed", source="none trained"),
)
NUMBERS = {
    "reward/sums": 0.75,
    "response_length/sums": 2.5,
    "truncated/sums": 0.25,
    "groups/sums": 2.0,
    "reward/words": 0.25,
    "response_length/words": 8.0,
    "truncated/words": 1.0,
    "groups/words": 1.0,
    "filtered/words": 2.0,
    "failed/none trained": 1.0,
}


def test_every_source_has_its_means_and_counts() -> None:
    assert source_stats(GROUPS, OUTCOMES, several=True) == NUMBERS
    assert truncated_share(GROUPS) == 0.5
    assert truncated_share(()) == 0.0


def test_a_job_with_one_source_says_nothing_twice() -> None:
    assert source_stats(GROUPS[:2], (), several=False) == {}


def test_a_key_is_read_as_it_was_written_and_nothing_else_is() -> None:
    assert [split_source_key(source_key(name, "a.b")) for name in ("reward", "groups")] == [
        ("reward", "a.b"),
        ("groups", "a.b"),
    ]
    assert [split_source_key(key) for key in ("reward", "reward/", "speed/a", "/a")] == [None] * 4


def test_a_step_of_demonstrations_says_no_reward() -> None:
    stats = {
        "reward": 0.0,
        "reward/sums": 0.0,
        "reward_before_filter": 0.0,
        "groups/sums": 2.0,
        "tokens": 9.0,
        "loss": 1.0,
    }
    assert drop_reward_stats(stats) == {"groups/sums": 2.0, "tokens": 9.0, "loss": 1.0}


def test_display_of_generated_pictures_has_no_metrics_in_tokens() -> None:
    counted = {"response_length": 5.0, "response_length/sums": 5.0, "truncated": 0.0, "tokens_per_second": 9.0}
    others = {"reward": 0.5, "reward/sums": 0.5, "loss": 1.0}
    assert drop_token_stats(counted | others) == counted | others
    pictures = {"denoising_steps": 5.0, "pictures_per_second": 2.0}
    assert drop_token_stats(counted | others | pictures) == others | pictures
    metrics = Metrics()
    stats = counted | others | pictures | {"response_length_before_filter": 5.0}
    show_job(metrics, *mirror_and_batch(stats), "a")
    shown = {
        name: metrics.registry.get_sample_value(name, {"job": "j"})
        for name in ("gcore_denoising_steps", "gcore_pictures_per_second", "gcore_response_tokens")
    }
    assert shown == {"gcore_denoising_steps": 5.0, "gcore_pictures_per_second": 2.0, "gcore_response_tokens": None}
    assert metrics.registry.get_sample_value("gcore_tokens_per_second", {"job": "j"}) is None
    of_source = {"job": "j", "source": "sums"}
    assert metrics.registry.get_sample_value("gcore_source_response_tokens", of_source) is None
    assert metrics.registry.get_sample_value("gcore_source_reward", of_source) == 0.5


def test_sources_with_mostly_truncated_responses_are_named() -> None:
    assert truncated_sources(NUMBERS | {"truncated": 0.9}, "data") == ["words"]
    assert truncated_sources({"truncated": 0.6}, "data") == ["data"]
    assert truncated_sources({"truncated": 0.5}, "data") == []
    assert truncated_sources({}, "data") == []


def mirror_and_batch(stats: dict[str, float]) -> tuple[JobMirror, WatchBatch]:
    """A job after one step, as just heard."""
    base = chain.base_entry(1, "w", ChainWriter("a", "n"))
    head = base.head.model_copy(update={"step": 1, "tally": add_to_tally(base.head.tally, GROUPS, OUTCOMES)})
    entry = base.entry.model_copy(update={"seq": 1, "kind": "train", "step": 1, "stats": stats, "writer": "a"})
    job = JobRecord(uid="u", name="j", spec={}, run_dir="/r", created=0.0, prompts=9)
    measured = {"mean@4": 0.5, "pass@1": 0.125, "pass@4": 0.375}
    scores = {"words": SourceScore(accuracy=0.125, count=8, samples=4, metrics=measured, unscored=3)}
    old, new = (Evaluation(version=Version(0, step), accuracy=0.5, count=8, by_source=scores) for step in (0, 1))
    records = {
        KEYS.job: job.encode(),
        KEYS.head: head.encode(),
        KEYS.log(1): entry.encode(),
        KEYS.evaluation("0.0"): old.model_copy(update={"by_source": {}}).encode(),
        KEYS.evaluation("0.1"): new.encode(),
    }
    puts = (WatchEvent("put", KeyValue(key, value, n, n)) for n, (key, value) in enumerate(records.items(), 1))
    batch = WatchBatch(tuple(puts), len(records))
    return JobMirror(KEYS).fold(batch), batch


def test_metrics_show_every_source() -> None:
    metrics = Metrics()
    show_job(metrics, *mirror_and_batch(NUMBERS), "a")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"job": "j", **labels})

    assert value("gcore_source_reward", source="sums") == 0.75
    assert value("gcore_source_truncated_ratio", source="words") == 1.0
    assert value("gcore_source_response_tokens", source="words") == 8.0
    assert value("gcore_source_accuracy_ratio", source="words") == 0.125
    assert value("gcore_source_accuracy_ratio", source="sums") is None
    assert value("gcore_source_prompts", source="sums", outcome="trained") == 2
    assert value("gcore_source_prompts", source="words", outcome="filtered") == 2
    labels = {"set": "words"}
    shown = {metric: value("gcore_eval", metric=metric, **labels) for metric in ("accuracy", "pass@4", "unscored")}
    assert shown == {"accuracy": 0.125, "pass@4": 0.375, "unscored": 3.0}
    metrics.forget_job("j")
    assert value("gcore_source_reward", source="sums") is None
    assert value("gcore_eval", metric="pass@4", **labels) is None


def test_the_api_reports_every_source_with_what_is_known_of_it() -> None:
    mirror, _ = mirror_and_batch(NUMBERS)
    none, sums, words = source_reports(mirror)
    assert (none.name, none.failed, none.HasField("mean_reward"), none.HasField("accuracy")) == (
        "none trained",
        1,
        False,
        False,
    )
    assert (sums.trained, sums.mean_reward, sums.mean_length, sums.truncated) == (2, 0.75, 2.5, 0.25)
    assert (words.filtered, words.accuracy) == (2, 0.125)
    assert dict(words.metrics) == {"mean@4": 0.5, "pass@1": 0.125, "pass@4": 0.375}
    assert (words.eval_samples, words.eval_unscored) == (4, 3)
    assert source_reports(JobMirror(KEYS)) == []


def test_the_api_says_no_reward_of_demonstrations() -> None:
    mirror, _ = mirror_and_batch(NUMBERS)
    assert mirror.job is not None
    shown_only = mirror.job.record.model_copy(update={"spec": {"train": {"loss": "sft"}}})
    reports = source_reports(replace(mirror, job=Versioned(shown_only, 1)))
    assert [report.HasField("mean_reward") for report in reports] == [False] * 3
    assert [report.trained for report in reports] == [0, 2, 1]


def test_the_api_names_the_best_state_and_its_checkpoint() -> None:
    mirror, _ = mirror_and_batch(NUMBERS)
    # Both evaluations have the same accuracy: the earlier step, which is the model that the job began with.
    first = best_checkpoint(mirror, "accuracy")
    assert first is not None
    assert (first.step, first.metric, first.value, first.checkpoint) == (0, "accuracy", 0.5, "")
    entry = Checkpoint(lineage=0, step=1, seq=1, file="checkpoints/0-1")
    mirror = replace(mirror, checkpoints=Versioned(Checkpoints(entries=(entry,)), 9))
    best = best_checkpoint(mirror, "words/pass@4")
    assert best is not None
    assert (best.step, best.value, best.checkpoint) == (1, 0.375, "/r/checkpoints/0-1")
    assert best_checkpoint(mirror, None) is None
    assert best_checkpoint(mirror, "words/pass@9") is None
    assert best_checkpoint(JobMirror(KEYS), "accuracy") is None
