"""The judges of a job on one controller: clients and metrics; for external judges (paid services) rate limit and
budget.

Every controller sends requests to external judges itself. The rate limit in the spec is for the whole cluster, so each
controller uses the rate divided by the number of members. While a member joins or leaves, the sum may briefly differ
from the limit.

Budget: each controller adds the cost of its requests to a record of its node in the store: for the first answer at
once, then every `WRITE_S`, and the rest at the end. All controllers read all of these records, and send no more
requests when the sum has reached `most_cost`. The limit may be exceeded by the requests in flight at that moment, and
by answers that the controllers have not written yet (every `WRITE_S`, or longer while the store is unreachable). If a
controller is killed, the cost that it has not written is lost. A request counts when its answer has arrived. The first
member reports for all that a judge's budget is spent; each node reports for itself that its API key is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from controllers.inference.judge_engines import JudgePool, QuestionEncoder, pictures_in_use
from controllers.workers.job_media import JobMedia, Pictures
from gcore.config.reward import JudgeModel, JudgeSpec
from gcore.config.spec import JobSpec, training_sources
from gcore.data.renderer import PromptRenderer
from gcore.errors import DataError, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.ledger.usage import NOTHING, JudgeUse, NodeSpent, add_uses, records_to_merge, spend, subtract_uses, use_cost
from gcore.media.placeholders import PictureRule, judge_rule
from gcore.observability.metrics import Metrics
from gcore.reward.api import PictureFile
from gcore.reward.judges.external import ExternalJudgeClient, judge_key
from gcore.reward.judges.judge import Judge
from gcore.reward.judges.rate_limit import Cause, RateLimiter
from gcore.reward.judges.types import Answer, ChatCall, ClassifierAnswer, ScoreCall, Why
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Store
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time
from gcore.types import PictureRef
from gcore.worker.sandbox.pool import PoolStatus

REPORT_FACTOR = 10
"""Answers that cannot be parsed are reported at the first one, and whenever their number has grown by this factor."""

LEAST_UNREADABLE = 32
"""A job does not end because of a judge's unparsable answers before the judge has given this many, all unparsable."""

READABLE = "Make the template request the format that verdict.parser reads, or change the parser"


def answers_of_a_step(spec: JobSpec) -> dict[str, int]:
    """Return, for each judge that training depends on, after how many answers, all unparsable, the job ends: those of
    one step, but at least `LEAST_UNREADABLE`.

    Judges that only evaluations use, and those with a substitute for errors (`on_error`), are left out.
    """
    responses = spec.flow.groups_per_step * spec.flow.samples_per_prompt
    used = {name for source in training_sources(spec) for name in source.reward.judges}
    return {
        judge.name: max(LEAST_UNREADABLE, responses * judge.votes)
        for judge in spec.judges
        if judge.name in used and isinstance(judge.on_error, str)
    }


class JudgeMetricsObserver:
    """Counts the requests and verdicts of judges for metrics, events and wait reports. Implements
    `gcore.reward.judges.types.JudgeObserver`, and the `JudgeRequestObserver` of the rate limiter."""

    def __init__(self, metrics: Metrics, tell: Callable[[str, str], None]) -> None:
        """`tell`: records an event; arguments: its topic and its sentence."""
        self._metrics = metrics
        self._tell = tell
        self._open: Counter[str] = Counter()
        self._answered = 0
        """Number of answered questions, as progress of a wait. Failed attempts do not count, so that waiting for a
        server that refuses everything is reported."""
        self._unreadable: Counter[str] = Counter()
        self._next_report: dict[str, int] = {}
        self._readable: set[str] = set()
        self._last_example: dict[str, str] = {}
        self._waits: dict[str, str] = {}
        """By judge: sentence that says why its requests are delayed."""

    @property
    def scoring(self) -> PoolStatus:
        """Load of the judges: the number of unanswered questions of this controller, the number of answered ones, and a
        sentence."""
        waiting = sum(self._open.values())
        names = " and ".join(sorted(repr(name) for name, count in self._open.items() if count > 0))
        count = "1 question waits" if waiting == 1 else f"{waiting} questions wait"
        why = "".join(f"; {one}" for _, one in sorted(self._waits.items()))
        return PoolStatus(waiting, self._answered, f"{count} for judge {names}{why}")

    def begun(self, judge: str) -> None:
        """Count a question as sent."""
        if judge not in self._open:
            self._metrics.know_judge(judge)
        self._open[judge] += 1
        self._metrics.judge_open.labels(judge).set(self._open[judge])

    def ended(self, judge: str) -> None:
        """Count a sent question as finished, with or without an answer."""
        self._open[judge] -= 1
        self._metrics.judge_open.labels(judge).set(self._open[judge])

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        """Count an answered question, with its latency and tokens."""
        self._answered += 1
        self._metrics.judge_seconds.labels(judge).observe(seconds)
        self._metrics.judge_questions.labels(judge, "answered").inc()
        self._metrics.judge_tokens.labels(judge, "question").inc(tokens_in)
        self._metrics.judge_tokens.labels(judge, "answer").inc(tokens_out)

    def failed(self, judge: str, why: Why) -> None:
        """Count a failed attempt. `why`: kind of the failure, a label of the metric."""
        self._metrics.judge_questions.labels(judge, why).inc()

    def verdict(self, judge: str, value: float) -> None:
        """Record a verdict (score) that was parsed from an answer."""
        self._readable.add(judge)
        self._metrics.judge_verdicts.labels(judge).observe(value)

    def unreadable(self, judge: str, example: str, why: str) -> None:
        """Count an answer that could not be parsed, and report it from time to time. `example`: its text."""
        self._metrics.judge_unreadable.labels(judge).inc()
        self._unreadable[judge] += 1
        count = self._unreadable[judge]
        self._last_example[judge] = f"such as {example!r}: {why}. {READABLE}"
        if count >= self._next_report.get(judge, 1):
            self._next_report[judge] = count * REPORT_FACTOR
            many = "an answer" if count == 1 else f"{count} answers"
            self._tell(
                f"judge-{judge}", f"judge {judge!r} gave {many} that cannot be parsed, {self._last_example[judge]}"
            )

    def unreadable_judge_reason(self, answers: Mapping[str, int]) -> str:
        """Return a sentence about a judge of which no answer could be parsed, as the reason to end the job; empty if
        there is none. `answers`: by judge, how many answers that takes (`answers_of_a_step`)."""
        for judge, many in answers.items():
            count = self._unreadable[judge]
            if count >= many and judge not in self._readable:
                return (
                    f"judge {judge!r} gave {count} answers and none of them can be parsed, {self._last_example[judge]}"
                )
        return ""

    def remembered(self, judge: str) -> None:
        """Count a question that was answered from the cache of verdicts."""
        self._metrics.judge_questions.labels(judge, "remembered").inc()

    def disagreed(self, judge: str, share: float) -> None:
        """Record the share of a group's pairs (pairwise judge) for which the two orders gave contradictory verdicts."""
        self._metrics.judge_disagreement.labels(judge).observe(share)

    def paid(self, judge: str, cost: float) -> None:
        """Add the cost of an answered request."""
        self._metrics.judge_cost.labels(judge).inc(cost)

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        """Add the seconds by which a request was delayed. `cause`: rate limit, budget or retry, a label of the
        metric."""
        self._metrics.judge_held.labels(judge, cause).inc(seconds)

    def waits(self, judge: str, why: str) -> None:
        """Set the sentence that says why the judge's next request is delayed; empty: it is not."""
        if why:
            self._waits[judge] = why
        else:
            self._waits.pop(judge, None)

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        """Record a problem of a judge as an event. `topic`: kind of the problem."""
        self._tell(f"judge-{topic}-{judge}", sentence)


WRITE_S = 2.0
"""Seconds between two writes of a controller's cost to the store."""

LAST_WRITE_S = 5.0
"""Maximum seconds for the last write when the controller stops working on the job."""


class JudgeBudget:
    """Counts the cost of external judges for the whole job, in one record per node in the store, and says when a budget
    is spent. Implements `gcore.reward.judges.rate_limit.Budget`.

    A *life* is one period in which a controller works on the job. The node's record has the requests of the present
    life and the sum of those before it.
    """

    def __init__(
        self,
        judges: Collection[JudgeSpec],
        store: Store,
        keys: JobKeys,
        node: str,
        me: str,
        clock: Clock,
        mirror: Callable[[], JobMirror],
        nodes: Callable[[], Collection[str]],
        paid: Callable[[str, float], None] = lambda judge, cost: None,
    ) -> None:
        """`me`: this run of the controller. `nodes`: returns the present nodes. `paid`: called with judge and cost of
        each answer."""
        self._judges = {judge.name: judge.external for judge in judges if judge.external is not None}
        self._store = store
        self._keys = keys
        self._node = node
        self._me = f"{me}.{uuid.uuid4().hex[:8]}"
        """Names this life. One run of a controller may work on a job several times; each time it begins a new life, in
        which it does not know its earlier requests."""
        self._clock = clock
        self._mirror = mirror
        self._nodes = nodes
        self._paid = paid
        self._mine: dict[str, JudgeUse] = {}
        """By judge: all requests of this life."""
        self._landed: dict[str, JudgeUse] = {}
        """The part of them that is in the store."""
        self._elsewhere: dict[str, JudgeUse] = {}
        """The part of them that is in the store, but in a record that another life has taken over since."""
        self._known: Versioned[NodeSpent] | None = None
        """The node's record as last written or read here."""
        self._news = asyncio.Event()

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        """Count an answered request and its tokens."""
        use = JudgeUse(requests=1, tokens_in=tokens_in, tokens_out=tokens_out)
        self._mine = add_uses((self._mine, {judge: use}))
        self._paid(judge, use_cost(use, self._judges[judge]))
        self._news.set()

    def cost(self, judge: str) -> float:
        """Return the cost of a judge for the whole job so far, as far as this controller knows."""
        mirror = self._mirror()
        seen, own = mirror.spent, mirror.spent.get(self._node)
        if self._known is not None and mirror.revision < self._known.revision:
            own = self._known  # not yet received by the watch
        others = (stored.record.uses for node, stored in seen.items() if node != self._node)
        total = add_uses((*others, self._next(own.record if own is not None else None).uses))
        return use_cost(total.get(judge, NOTHING), self._judges[judge])

    def overdrawn(self, judge: str) -> str:
        """Return a sentence if the budget of a judge is spent, else an empty string."""
        most = self._judges[judge].most_cost
        if most is None or (cost := self.cost(judge)) < most:
            return ""
        return (
            f"judge {judge!r} has spent {cost:.{'2f' if cost >= 1 else '4g'}} of its external.most_cost {most:g}, so it gets no more requests; a "
            "job's spec cannot be changed: cancel the job, export its model, and start a new job from it with a higher limit"
        )

    async def run(self) -> None:
        """Write new costs to the store every `WRITE_S`, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not await self._write():
                self._news.set()
            await self._clock.sleep(WRITE_S)

    async def finish(self) -> None:
        """Write the costs that are not in the store yet, within `LAST_WRITE_S`."""
        with contextlib.suppress(TimeoutError):
            async with limit_time(LAST_WRITE_S):
                while self._mine != self._landed and not await self._write():
                    await self._clock.sleep(WRITE_S / 10)

    async def _write(self) -> bool:
        """Write this node's record. Return whether the store then has everything that was counted when the write
        began."""
        try:
            kv = await self._store.get(self._keys.spent(self._node))
            there = _read(kv)
            if there is not None and there.by == self._me:  # a write without a response may have succeeded
                self._landed = add_uses((there.life, self._elsewhere))
                self._known = Versioned(there, kv.mod_revision) if kv is not None else None
            else:
                self._elsewhere = self._landed
            mine, new = self._mine, self._next(there)
            gone = records_to_merge(self._mirror().spent, self._node, self._nodes())
            old = None if kv is None else Versioned(new, kv.mod_revision)  # compares only the revision
            txn = spend(self._keys, old, new, gone)
            report = await TransactionExecutor(self._store, self._keys).run(txn)
        except StoreUnavailable:
            return False
        if report.outcome is not TxnOutcome.WON:
            return False
        self._landed = mine
        before = add_uses((new.before, *(stored.record.uses for stored in gone.values())))
        self._known = Versioned(new.model_copy(update={"before": before}), report.revision)
        return True

    def _next(self, there: NodeSpent | None) -> NodeSpent:
        """Return the node's new record: the stored one `there`, with all requests of this life included once."""
        if there is not None and there.by == self._me:
            return there.model_copy(update={"life": subtract_uses(self._mine, self._elsewhere)})
        before = {} if there is None else there.uses
        return NodeSpent(node=self._node, by=self._me, before=before, life=subtract_uses(self._mine, self._landed))


def _read(kv: KeyValue | None) -> NodeSpent | None:
    """Parse a node's record; None if there is none or it is damaged, so that a new one is written."""
    try:
        return None if kv is None else NodeSpent.decode(kv.value, kv.key)
    except UnreadableRecord:
        return None


BUDGET_CHECK_S = 1.0
"""Seconds between two checks whether a budget is spent."""


class ExternalJudges:
    """The external judges of a job on one controller: their clients, costs and budgets."""

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        keys: JobKeys,
        node: str,
        me: str,
        clock: Clock,
        counts: JudgeMetricsObserver,
        mirror: Callable[[], JobMirror],
        nodes: Callable[[], Collection[str]],
        tell: Callable[[str, str], None],
        environ: Mapping[str, str],
        media: JobMedia | None = None,
    ) -> None:
        """`nodes`: returns the present nodes. `tell`: records an event by topic. `environ`: environment variables, with
        the API keys. `media`: provides the pictures of questions; None: they have none."""
        self._judges = [judge for judge in spec.judges if judge.external is not None]
        self._me = me
        self._clock = clock
        self._counts = counts
        self._mirror = mirror
        self._tell = tell
        self._environ = environ
        self._media = media
        self.spending = JudgeBudget(self._judges, store, keys, node, me, clock, mirror, nodes, counts.paid)
        self._asks: dict[str, ExternalJudgeClient] = {}
        self._reported: set[str] = set()
        """Judges for which this controller has reported that the budget is spent."""

    def asker(self, number: int, judge: JudgeSpec) -> ExternalJudgeClient:
        """Return the client of judge number `number` of the spec; the same object at each call, because the preparation
        of a job may be retried. Raises DataError if its API key is missing."""
        assert judge.external is not None
        if (known := self._asks.get(judge.name)) is not None:
            return known
        key = judge_key(judge, self._environ, f"judges.{number}")
        gate = RateLimiter(
            judge.name, judge.external, self.spending, self._counts, self._clock, lambda: len(self._mirror().members)
        )
        ask = ExternalJudgeClient(
            judge, key, gate, self.spending, self._counts, self._clock, open_pictures=self._open_pictures
        )
        self._asks[judge.name] = ask
        return ask

    @contextlib.asynccontextmanager
    async def _open_pictures(self, pictures: Pictures) -> AsyncIterator[tuple[PictureFile, ...]]:
        """Yield the files of the blobs of pictures, in the size in which the policy saw or generated them."""
        assert self._media is not None
        async with pictures_in_use(self._media, pictures) as (_, made):
            yield self._media.picture_files(made)

    async def run(self) -> None:
        """Write costs and report spent budgets, until cancelled."""
        if not self._judges:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self.spending.run(), name="spending")
            group.create_task(self._watch(), name="most cost")

    async def close(self) -> None:
        """Write the remaining costs, and close all connections."""
        await self.spending.finish()
        for ask in self._asks.values():
            await ask.close()

    async def _watch(self) -> None:
        while True:
            for judge in self._judges:
                self._tell_spent(judge)
            await self._clock.sleep(BUDGET_CHECK_S)

    def _tell_spent(self, judge: JudgeSpec) -> None:
        assert judge.external is not None
        mirror, topic = self._mirror(), f"judge-cost-{judge.name}"
        if judge.name in self._reported or topic in mirror.troubles or self._me != min(mirror.members, default=None):
            return
        if self.spending.overdrawn(judge.name):
            self._reported.add(judge.name)
            most = f"{judge.external.most_cost:g}"
            self._tell(
                topic, f"judge {judge.name!r} has spent its budget of {most} (external.most_cost), and the job waits"
            )


def open_judges(
    spec: JobSpec,
    engines: Mapping[str, JudgePool],
    counts: JudgeMetricsObserver,
    clock: Clock,
    external: ExternalJudges | None = None,
) -> Mapping[str, Judge]:
    """Open all judges of a job; return them by name. `spec`: with the models' folders on this node. `engines`: pools of
    the judges that the cluster serves, by name. `external`: the external judges, if there are any.

    Blocks, because it loads tokenizers. Raises SpecError, DataError.
    """
    generates = spec.rollout.diffusion is not None
    seeing = not generates and any(judge.images for judge in spec.judges)
    picture_text = PictureRule.load(spec.model.path).picture_text if seeing else ""
    return {
        judge.name: Judge.of(
            judge,
            _opened(number, judge, spec.judge_model(judge), engines, counts, external),
            counts,
            clock,
            where=f"judges.{number}",
            picture_text=picture_text,
            generates=generates,
        )
        for number, judge in enumerate(spec.judges)
    }


def judge_encoder(number: int, judge: JudgeSpec, folder: Path) -> QuestionEncoder:
    """Load what turns questions into tokens for judge number `number` of the spec, which the cluster serves. `folder`:
    of its model. Blocks. Raises DataError."""
    with blame_judge(number, judge):
        rule = judge_rule(folder) if judge.images else None
        if rule is not None:
            rule.check_processor()
        renderer = PromptRenderer.load(
            folder,
            chat=judge.chat,
            system=judge.system,
            variables=judge.template_variables,
            picture_text="" if rule is None else rule.picture_text,
        )
    return QuestionEncoder(renderer, rule)


@contextmanager
def blame_judge(number: int, judge: JudgeSpec) -> Iterator[None]:
    """Change errors about a judge's model so that they name judge number `number` and the fields of its section. The
    underlying code names the fields of the policy."""
    try:
        yield
    except DataError as error:
        where = f"judges.{number} ({judge.name!r})" + (f", {_own(number, judge, error.where)}" if error.where else "")
        raise type(error)(error.what, where=where, fix=_own(number, judge, error.fix or "") or None) from error


def _own(number: int, judge: JudgeSpec, text: str) -> str:
    """Replace the names of the policy's fields in an error message by those of judge number `number`. An adapter has the
    policy's model."""
    text = text.replace("or name one in `template`", "or take another model")
    text = text.replace("or remove data.images", f"or remove judges.{number}.images")
    text = re.sub(r"(?<![\w.])model\.chat\b", f"judges.{number}.chat", text)
    if judge.adapter is not None:
        return text
    return re.sub(r"(?<![\w.])model\.(path|trust_remote_code|max_length)\b", rf"judges.{number}.model.\1", text)


def _opened(
    number: int,
    judge: JudgeSpec,
    model: JudgeModel,
    engines: Mapping[str, JudgePool],
    counts: JudgeMetricsObserver,
    external: ExternalJudges | None,
) -> ChatCall | ScoreCall:
    if judge.external is not None:
        assert external is not None
        return CountingChatCall(external.asker(number, judge), judge.name, counts)
    encoder = judge_encoder(number, judge, Path(model.path))
    limit, pool = model.max_length or encoder.max_length, engines[judge.name]
    if judge.kind == "classifier":
        return CountingScoreCall(pool.valuer(encoder, limit), judge.name, counts)
    return CountingChatCall(pool.asker(encoder, limit), judge.name, counts)


class CountingChatCall:
    """Wraps the client of a generative judge, to count its open questions. Implements `ChatCall`."""

    def __init__(self, ask: ChatCall, judge: str, counts: JudgeMetricsObserver) -> None:
        self._ask = ask
        self._judge = judge
        self._counts = counts

    async def __call__(
        self, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...] = ()
    ) -> tuple[Answer, ...]:
        """Forward the question to the client."""
        self._counts.begun(self._judge)
        try:
            return await self._ask(question, seeds, pictures)
        finally:
            self._counts.ended(self._judge)


class CountingScoreCall:
    """Wraps the client of a classifier, to count its open questions. Implements `ScoreCall`."""

    def __init__(self, value: ScoreCall, judge: str, counts: JudgeMetricsObserver) -> None:
        self._value = value
        self._judge = judge
        self._counts = counts

    async def __call__(self, question: str, pictures: tuple[PictureRef, ...] = ()) -> ClassifierAnswer:
        """Forward the question to the client."""
        self._counts.begun(self._judge)
        try:
            return await self._value(question, pictures)
        finally:
            self._counts.ended(self._judge)
