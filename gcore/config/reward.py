"""The sections `reward`, `scoring` and `judges` of a job spec: how responses are scored.

A reward, or a part of a composed one, is a function that is found by its name, or a judge of the section `judges`. `compose`
says what parts come to together. A judge is a model, served by engines of the reward pool or asked at an address outside of
the cluster; its template is what it is shown, and its verdict's parser reads its answer. What cannot be judged is never
counted as 0 in silence: `on_error` says what becomes of the group.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from gcore.config.base import (
    MOST_SLOTS,
    SPANS,
    VARIABLES_HELP,
    FilePath,
    ModelPath,
    Option,
    Section,
    SlotsPerEngine,
    TemplateVariables,
    is_unset,
    refuse_torch,
)
from gcore.types import LARGEST_REWARD

DEFAULT_REWARD = "numeric"

DEFAULT_ANSWER = "answer"

NEEDS_ANSWER = frozenset({"numeric", "math", "exact", "code"})
"""gcore's own rewards that compare with an expected answer. A plug-in says itself what it needs, unless the spec names a field."""

MAX_PARTS = 16

ANSWER_HELP = (
    "Field of the prompt's entry that holds the expected answer, or a path to a nested one: reward_model.ground_truth"
)
OPTIONS_HELP = "Settings of the reward's own, by name"
JUDGE_HELP = "The judge of `judges` that scores, in place of a reward's name"


class RewardPart(Section):
    """One of the rewards that a composed one is made of."""

    name: str | None = Field(None, description="Reward, by its entry-point name in `gcore.rewards`")
    judge: str | None = Field(None, description=JUDGE_HELP)
    label: Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None = Field(
        None,
        description="Under which its value is kept and shown; default: its name or its judge's. No two parts have the same",
    )
    answer: str | None = Field(None, description=f"{ANSWER_HELP}; default: reward.answer")
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    weight: float = Field(1.0, description="What its value is multiplied with")

    @model_validator(mode="after")
    def _one_form(self) -> RewardPart:
        if (self.name is None) == (self.judge is None):
            raise ValueError(f"a part has a name or a judge; {'both' if self.name is not None else 'neither'} is given")
        if self.judge is not None and (self.options or self.answer is not None):
            raise ValueError(f"judge {self.judge!r} looks at what its template shows it; leave options and answer out")
        return self

    @property
    def shown_as(self) -> str:
        """Its label, or else its name, or its judge's."""
        return self.label or self.name or self.judge or ""


class RewardSpec(Section):
    """Scoring."""

    name: str = Field(
        DEFAULT_REWARD,
        description="Reward, by its entry-point name in `gcore.rewards`; a composed one has parts instead",
    )
    judge: str | None = Field(None, description=JUDGE_HELP)
    answer: str = Field(DEFAULT_ANSWER, description=ANSWER_HELP)
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    parts: tuple[RewardPart, ...] = Field((), description="Rewards that together make the response's")
    compose: Literal["sum", "gate", "min"] = Field(
        "sum",
        description="How parts make one reward. sum: weight times value, added up; gate: the first part only decides: "
        "unless it is positive the reward is 0, else the sum of the others; min: the smallest of weight times value",
    )
    timeout_s: PositiveFloat = Field(
        10.0, le=3600, description="Longest time one response may take to be scored, in seconds"
    )
    timeout_value: Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)] | None = Field(
        None,
        description="What a response is worth whose scoring took longer or killed its process; default: its prompt fails",
    )

    @model_validator(mode="after")
    def _one_form(self) -> RewardSpec:
        if self.judge is not None and (self.name != DEFAULT_REWARD or self.options or self.parts):
            raise ValueError("give a judge, a name with options, or parts that have their own, only one of them")
        if not self.parts:
            if self.compose != "sum":
                raise ValueError("compose belongs to parts; there are none")
            return self
        if self.name != DEFAULT_REWARD or self.options:
            raise ValueError("give a name with options, or parts that have their own, not both")
        if len(self.parts) > MAX_PARTS:
            raise ValueError(f"{len(self.parts)} parts; at most {MAX_PARTS}")
        label, times = Counter(part.shown_as for part in self.parts).most_common(1)[0]
        if times > 1:
            raise ValueError(f"two parts are called {label!r}; give them labels that differ")
        labels = sorted(part.shown_as for part in self.parts)
        for one, other in permutations(labels, 2):
            if other.startswith(f"{one}."):
                raise ValueError(f"{other!r} is what a part of {one!r} would be called; give them labels that differ")
        if self.compose == "gate":
            if len(self.parts) < 2:
                raise ValueError("a gate needs a part behind it; list at least two")
            if self.parts[0].weight != 1.0:
                raise ValueError(f"part {self.parts[0].shown_as!r} is the gate and only decides; it has no weight")
        return self

    @property
    def answers(self) -> tuple[str, ...]:
        """The fields that an entry must have for it, each once. What a judge is shown, its template says."""
        if self.judge is not None:
            return ()
        wanted = [(part.name, part.answer or self.answer) for part in self.parts if part.judge is None]
        if not self.parts:
            wanted = [(self.name, self.answer)]
        needed = (answer for name, answer in wanted if name in NEEDS_ANSWER or _is_named(name, answer))
        return tuple(dict.fromkeys(needed))

    @property
    def judges(self) -> tuple[str, ...]:
        """The judges that it names, each once."""
        named = [self.judge, *(part.judge for part in self.parts)]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def shown_as(self) -> str:
        """Its name; for people."""
        inner = ", ".join(part.shown_as for part in self.parts)
        return f"{self.compose}({inner})" if self.parts else self.judge or self.name

    def of_part(self, part: RewardPart) -> RewardSpec:
        """What `part` is told: as if it were the only reward. Raises ValueError for a judge's, which is told nothing."""
        if part.name is None:
            raise ValueError(f"part {part.shown_as!r} is a judge's")
        return RewardSpec(
            name=part.name, answer=part.answer or self.answer, options=part.options, timeout_s=self.timeout_s
        )


def _is_named(name: str | None, answer: str) -> bool:
    """Whether the spec names the field for a reward of somebody else's."""
    return answer != DEFAULT_ANSWER and name not in ("regex", "length", "environment", "agent")


class ScoringSpec(Section):
    """Where rewards run: in processes of their own on each controller's node."""

    workers: PositiveInt = Field(1, le=256, description="Processes on each node; each scores one response at a time")
    memory_mb: PositiveInt = Field(4096, ge=64, le=1 << 30, description="Most memory that one of them may take, in MiB")
    start_timeout_s: PositiveFloat = Field(
        120.0, le=3600, description="Longest time one of them may take to load the rewards, in seconds"
    )


JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,30}[A-Za-z0-9])?$")]

KEY = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+)$"
"""Without a bound of its own: each of thousands would be compiled, 8 MB in every daemon."""

MOST_JUDGES = 16
MOST_WORDS = 64
LONGEST_TEMPLATE = 20_000
MOST_VOTES = 64

LEAST_RATE = 0.001
"""Requests a second: who asks less than one in a quarter of an hour waits for a mistake."""

OWN_PARSERS = ("number", "words", "json")
"""gcore's own, in `gcore.verdicts`."""


class JudgeModel(Section):
    """A model that gcore serves."""

    path: ModelPath = Field(
        description="Folder of a Hugging Face model with its tokenizer, relative to the spec's folder; or "
        "hf://OWNER/NAME[@REVISION], ms://OWNER/NAME[@REVISION]"
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model; read that code first"
    )
    max_length: PositiveInt | None = Field(
        None, description="Longest question plus answer, in tokens; default: the model's own limit"
    )


class JudgeServing(Section):
    """The engines of one judge."""

    engine: Literal["torch", "sglang"] = Field("torch", description="What serves it")
    slots_per_engine: SlotsPerEngine = Field(1, description=f"{SPANS}; the same for all judges")
    replicas: PositiveInt | None = Field(
        None, le=MOST_SLOTS, description="Engines in the cluster; default: one on each of its slots"
    )
    batch_slots: PositiveInt = Field(64, description="Sequences an engine decodes at once, at most")
    cache_tokens: PositiveInt | None = Field(
        None, description="Tokens an engine caches at once, at most; default: from the memory that is free"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Tokens of questions an engine takes in between two tokens of what it is decoding"
    )
    engine_args: tuple[str, ...] = Field((), description="Further arguments of SGLang's server, word by word")

    @model_validator(mode="after")
    def _arguments_are_sglangs(self) -> JudgeServing:
        if self.engine == "torch" and self.engine_args:
            raise ValueError("engine_args are SGLang's; set engine: sglang")
        if (why := refuse_torch(self.engine, self.slots_per_engine)) is not None:
            raise ValueError(why)
        return self


def _address(url: str) -> str:
    """`url`, if questions can be sent below it. Raises ValueError."""
    if not url.isprintable() or " " in url:
        raise ValueError("an address has no spaces and nothing that cannot be printed")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"it is no address ({error})") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError("it should begin with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "it should have no name and no password: specs are stored and shown; say in key where a key is"
        )
    if not host or port == 0:
        raise ValueError(f"it names no {'port' if host else 'host'}, such as in https://api.example.com/v1")
    if "?" in url or "#" in url:
        raise ValueError("it should have no ? and no #: /chat/completions is put behind it")
    return url


class ExternalJudge(Section):
    """A judge outside of the cluster, which speaks OpenAI's chat completions."""

    url: Annotated[str, AfterValidator(_address)] = Field(
        description="Base address, such as https://api.example.com/v1; /chat/completions is asked there"
    )
    model: str = Field(description="What the model is called there")
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, description="Environment variable of the controllers that holds the key; the key itself is never stored"
    )
    key: Annotated[str, Field(pattern=KEY, max_length=4006)] | None = Field(
        None,
        description="Where the controllers find the key: env:NAME, an environment variable, or file:/PATH; never the key itself",
    )
    requests_per_s: Annotated[float, Field(ge=LEAST_RATE)] = Field(
        10.0, description="Most requests a second from the whole cluster"
    )
    in_flight: PositiveInt = Field(32, description="Requests under way from one controller, at most")
    price_in: Annotated[float, Field(ge=0)] = Field(0.0, description="Price of a million tokens of questions")
    price_out: Annotated[float, Field(ge=0)] = Field(0.0, description="Price of a million tokens of answers")
    most_cost: PositiveFloat | None = Field(
        None, description="What the whole job may spend on it, in the unit of the prices; then the job waits"
    )

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `key` where it says nothing: a daemon from before there was one reads the rest."""
        tree: dict[str, Any] = written(self)
        return tree if self.key is not None else {name: value for name, value in tree.items() if name != "key"}

    @property
    def key_reference(self) -> str | None:
        """Where the key is, if it needs one."""
        return f"env:{self.key_env}" if self.key_env is not None else self.key

    @model_validator(mode="after")
    def _one_key(self) -> ExternalJudge:
        if self.key is not None and self.key_env is not None:
            raise ValueError("key and key_env both say where the key is; give one")
        return self

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> ExternalJudge:
        if self.most_cost is not None and not (self.price_in or self.price_out):
            raise ValueError("most_cost needs price_in or price_out")
        return self


class VerdictSpec(Section):
    """How a judge's answer becomes a number."""

    parser: str = Field(
        "number",
        description="By entry-point name in `gcore.verdicts`. number: the last number in the answer; words: one of `words`; "
        "json: a field of the last JSON object",
    )
    after: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only what follows the last of this text is looked at; an answer without it cannot be read"
    )
    words: dict[str, float] = Field(
        {}, max_length=MOST_WORDS, description="With parser: words, what a verdict may be, and what each is worth"
    )
    field: str = Field("score", description="With parser: json, the field that holds the number, or one of `words`")
    least: float = Field(0.0, description="A smaller number cannot be the verdict")
    most: float = Field(1.0, description="A larger number cannot be the verdict")
    scale: bool = Field(False, description="Move numbers from least..most to 0..1")
    options: dict[str, Option] = Field({}, description="Settings of a parser of your own, by name")

    @model_validator(mode="after")
    def _fits_together(self) -> VerdictSpec:
        if self.least >= self.most:
            raise ValueError(f"least ({self.least:g}) is not below most ({self.most:g})")
        if self.scale and math.isinf(self.most - self.least):
            raise ValueError(f"what lies from least ({self.least:g}) to most ({self.most:g}) is too much to be scaled")
        if self.parser == "words" and not self.words:
            raise ValueError("parser: words needs words, such as {Y: 1, N: 0}")
        if self.parser == "number" and self.words:
            raise ValueError("words belong to parser: words or json")
        if "" in self.words:
            raise ValueError("a word of a verdict cannot be empty")
        for word, worth in self.words.items():
            if not self.least <= worth <= self.most:
                raise ValueError(
                    f"the word {word!r} is worth {worth:g}, which is not from least ({self.least:g}) to most ({self.most:g})"
                )
        if self.options and self.parser in OWN_PARSERS:
            raise ValueError(f"parser: {self.parser} has no options; they are for a parser of your own")
        return self


class Fallback(Section):
    """What scores instead, when the judge cannot."""

    fallback: str = Field(description="Reward, by its entry-point name in `gcore.rewards`")
    options: dict[str, Option] = Field({}, description="Settings of that reward's own, by name")


class JudgeSpec(Section):
    """One judge."""

    name: JudgeName = Field(description="By which rewards name it, and under which it is shown")
    kind: Literal["generative", "classifier"] = Field(
        "generative",
        description="What it says. generative: it writes an answer, which is read by `verdict`; classifier: a sequence-classification "
        "head says one number",
    )
    model: JudgeModel | None = Field(None, description="The model, if the cluster serves it")
    serving: JudgeServing = Field(JudgeServing(), description="The engines that serve it")
    external: ExternalJudge | None = Field(None, description="Where it is asked, if somebody else serves it")
    mode: Literal["pointwise", "pairwise"] = Field(
        "pointwise",
        description="What it looks at. pointwise: each response for itself; pairwise: which of two responses of a group is better, each pair in "
        "both orders, and a response is worth the share that it wins",
    )
    opponents: PositiveInt | None = Field(
        None, description="With pairwise: how many others each response is held against; default: all of its group"
    )
    template: Annotated[str, Field(max_length=LONGEST_TEMPLATE)] | None = Field(
        None,
        description="What it is shown, in Jinja: `prompt`, `response` (pairwise: `first` and `second`) and the entry's `fields`",
    )
    template_file: FilePath | None = Field(None, description="The same, from a file, relative to the spec's folder")
    chat: bool = Field(
        False, description="Wrap what it is shown with the tokenizer's chat template; otherwise plain text"
    )
    system: str | None = Field(None, description="System message before it; needs chat, or an external judge")
    template_variables: TemplateVariables | None = Field(
        None, exclude_if=is_unset, description=f"{VARIABLES_HELP}; needs chat and a model of the cluster's"
    )
    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(
        0.0,
        description="Sampling temperature. 0: the likeliest token, always (greedy); above: drawn, each vote from a seed of its own",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus of what is drawn")
    max_new_tokens: PositiveInt = Field(256, description="Longest answer, in tokens")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Strings that end an answer")
    votes: Annotated[int, Field(ge=1, le=MOST_VOTES)] = Field(
        1, description="Answers to one question; the verdict is the mean of those that can be read"
    )
    verdict: VerdictSpec = VerdictSpec()
    on_error: Literal["retry", "fail_group"] | Fallback = Field(
        "retry",
        description="When it cannot be asked, or no answer can be read: retry: the prompt is issued again "
        "(flow.max_reissues); fail_group: the prompt has failed; {fallback: NAME}: that reward scores instead",
    )
    tries: PositiveInt = Field(3, description="Engines or requests that are tried for one question before on_error")
    timeout_s: PositiveFloat = Field(
        120.0,
        le=3600,
        description="Longest wait for the answer of an external judge; of the cluster's own, the longest time in which its engine "
        "sends nothing, with what it has queued before the question in it",
    )
    remembered: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        10_000, description="Questions whose verdicts each controller remembers; the same question is not asked again"
    )
    queue: PositiveInt = Field(
        1024, description="Questions that one controller has open, at most: then it begins no further prompts"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> JudgeSpec:
        if (self.model is None) == (self.external is None):
            both = "both are given" if self.model is not None else "neither is given"
            raise ValueError(f"a judge has a model, or is external; {both}")
        if (self.template is None) == (self.template_file is None):
            both = "both are given" if self.template is not None else "neither is given"
            raise ValueError(f"say what the judge is shown, in template or in template_file; {both}")
        if self.external is not None and self.serving != JudgeServing():
            raise ValueError("serving is for a judge with a model; an external one has its own engines")
        if self.system is not None and not (self.chat or self.external is not None):
            raise ValueError("system needs chat: true")
        if self.template_variables and not (self.chat and self.model is not None):
            raise ValueError("template_variables are a chat template's; they need model and chat: true")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"a temperature of {self.temperature} is neither greedy (0) nor at least 1e-06")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes is {self.votes} with temperature 0, which gives the same answer each time; set a temperature, or votes: 1"
            )
        if self.opponents is not None and self.mode != "pairwise":
            raise ValueError("opponents belong to mode: pairwise")
        told = self.verdict
        if self.mode == "pairwise" and not told.scale and (told.least < 0 or told.most > 1):
            raise ValueError(
                f"mode: pairwise needs verdicts from 0 (the second) to 1 (the first), and verdict gives {told.least:g} to "
                f"{told.most:g}; set verdict.scale: true"
            )
        if self.kind == "classifier":
            self._refuse_for_classifier()
        return self

    def _refuse_for_classifier(self) -> None:
        if self.external is not None:
            raise ValueError("kind: classifier needs a model; an external judge is generative")
        if self.mode == "pairwise":
            raise ValueError("kind: classifier scores each response for itself; leave mode out")
        for name in ("temperature", "top_p", "max_new_tokens", "stop", "votes", "verdict"):
            if getattr(self, name) != JudgeSpec.model_fields[name].default:
                raise ValueError(f"{name} is for a judge that writes; kind: classifier says one number")
