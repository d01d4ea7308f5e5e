"""The sections `reward`, `scoring` and `judges` of a job spec: how responses are scored.

A reward, or a part of a composed reward, is a named function or a judge from the section `judges`. `compose` says how parts
combine. A judge is a model that engines of the reward pool serve, or an external one at an address outside the cluster. Its
template renders its input, and its verdict parser reads its output. A response that cannot be judged never silently counts
as 0: `on_error` says what happens to the group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
)
from gcore.config.capabilities import ENGINES, lacking
from gcore.plugins import short_name, shown_name
from gcore.types import LARGEST_REWARD

DEFAULT_REWARD = "numeric"

DEFAULT_ANSWER = "answer"

NEEDS_ANSWER = frozenset({"numeric", "math", "exact", "code"})
"""Built-in rewards that need an expected answer. A plug-in declares what it needs, unless the spec names a field."""

STANDARD_EPS = 1e-8
"""Default of `reward.std_eps`, as in DanceGRPO."""

TEXT_REWARDS = frozenset({"numeric", "math", "exact", "regex", "length", "code", "environment", "agent"})
"""Built-in rewards. All of them score texts."""

MAX_PARTS = 16

ANSWER_HELP = (
    "Field of the prompt's entry with the expected answer, or a path to a nested field: reward_model.ground_truth"
)
OPTIONS_HELP = "Settings of the reward, by name"
JUDGE_HELP = "Judge from `judges` that scores, instead of a reward function"


class RewardPart(Section):
    """One part of a composed reward: a reward function (`name`) or a judge."""

    name: str | None = Field(None, description="Reward, by entry-point name in `gcore.rewards`")
    judge: str | None = Field(None, description=JUDGE_HELP)
    label: Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None = Field(
        None,
        description="Name of the part in metrics and samples. Must differ between parts. Default: the name of its reward, function or "
        "judge",
    )
    answer: str | None = Field(None, description=f"{ANSWER_HELP}. Default: reward.answer")
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    weight: float = Field(1.0, description="Factor of the part's value")

    @model_validator(mode="after")
    def _check_form(self) -> RewardPart:
        if (self.name is None) == (self.judge is None):
            raise ValueError(
                f"a part needs either a name or a judge, but {'both are' if self.name is not None else 'neither is'} set"
            )
        if self.judge is not None and (self.options or self.answer is not None):
            raise ValueError(f"judge {self.judge!r} reads its input from its template; leave options and answer out")
        return self

    @property
    def shown_as(self) -> str:
        """The label; by default the name of the reward or judge, or the name of the function in a file."""
        return self.label or short_name(self.name or self.judge or "")


class RewardSpec(Section):
    """How responses are scored. A list of rewards is short for `parts`, which are summed up."""

    name: str = Field(
        DEFAULT_REWARD,
        description="Reward, by entry-point name in `gcore.rewards`. A composed reward has parts instead",
    )
    judge: str | None = Field(None, description=JUDGE_HELP)
    answer: str = Field(DEFAULT_ANSWER, description=ANSWER_HELP)
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    parts: tuple[RewardPart, ...] = Field((), description="Parts of a composed reward")
    compose: Literal["sum", "gate", "min", "standardised"] = Field(
        "sum",
        description="How parts combine. sum: the sum of weight times value. gate: if the first part is not positive, 0; otherwise the "
        "sum of the other parts. min: the smallest weight times value. standardised: the sum of weight times the value's distance from "
        "the mean of its group, in deviations of the group; in evaluation as sum",
    )
    std_ddof: Literal[0, 1] = Field(
        1,
        exclude_if=lambda ddof: ddof == 1,
        description="With compose: standardised. 1: deviation of a sample, as DanceGRPO. 0: of a population",
    )
    std_eps: Annotated[float, Field(ge=0)] = Field(
        STANDARD_EPS,
        exclude_if=lambda eps: eps == STANDARD_EPS,
        description="With compose: standardised. What is added to the deviation",
    )
    timeout_s: PositiveFloat = Field(
        10.0, le=3600, description="Maximum time to score one response, in seconds; with a batch reward, one group"
    )
    timeout_value: Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)] | None = Field(
        None,
        description="Reward of a response whose scoring timed out or killed its process. Default: the prompt fails",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_list(cls, given: Any) -> Any:
        """Convert a list of rewards, the short form of `parts`. Raises ValueError if it is empty."""
        if not isinstance(given, list | tuple):
            return given
        if not given:
            raise ValueError("the list of rewards is empty; name at least one, or leave it out")
        return {"parts": given}

    @model_validator(mode="after")
    def _check_form(self) -> RewardSpec:
        if self.judge is not None and (self.name != DEFAULT_REWARD or self.options or self.parts):
            raise ValueError("set only one of judge, name (with options), and parts (with options of their own)")
        if self.compose != "standardised" and (self.std_ddof, self.std_eps) != (1, STANDARD_EPS):
            raise ValueError("std_ddof and std_eps need compose: standardised; set it, or leave them out")
        if self.compose == "standardised" and self.timeout_value is not None:
            raise ValueError(
                "timeout_value replaces a whole reward, which compose: standardised computes from its group; leave one of them out"
            )
        if not self.parts:
            if self.compose != "sum":
                raise ValueError("compose needs parts, but there are none; list parts, or leave compose out")
            return self
        if self.name != DEFAULT_REWARD or self.options:
            raise ValueError("set either name (with options) or parts (with options of their own), not both")
        if len(self.parts) > MAX_PARTS:
            raise ValueError(f"there are {len(self.parts)} parts, but at most {MAX_PARTS} are allowed; remove some")
        label, times = Counter(part.shown_as for part in self.parts).most_common(1)[0]
        if times > 1:
            raise ValueError(f"two parts have the label {label!r}; set labels that differ")
        labels = sorted(part.shown_as for part in self.parts)
        for one, other in permutations(labels, 2):
            if other.startswith(f"{one}."):
                raise ValueError(
                    f"label {other!r} is the name that a component of part {one!r} would get; set another label"
                )
        if self.compose == "gate":
            if len(self.parts) < 2:
                raise ValueError("compose: gate needs a part after the gate; list at least two parts")
            if self.parts[0].weight != 1.0:
                raise ValueError(f"part {self.parts[0].shown_as!r} is the gate, which has no weight; leave weight out")
        return self

    @property
    def answers(self) -> tuple[str, ...]:
        """The fields that an entry must have for this reward, without duplicates. A judge's template names its own fields."""
        if self.judge is not None:
            return ()
        wanted = [(part.name, part.answer or self.answer) for part in self.parts if part.judge is None]
        if not self.parts:
            wanted = [(self.name, self.answer)]
        needed = (answer for name, answer in wanted if name in NEEDS_ANSWER or _is_named(name, answer))
        return tuple(dict.fromkeys(needed))

    @property
    def compares_group(self) -> bool:
        """Whether the reward of a response depends on the other responses of its group, apart from judges that compare them."""
        return self.compose == "standardised"

    @property
    def judges(self) -> tuple[str, ...]:
        """The judges that this reward names, without duplicates."""
        named = [self.judge, *(part.judge for part in self.parts)]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def shown_as(self) -> str:
        """Name for display: that of the reward or judge; of a composed reward, such as `sum(math, length)`."""
        inner = ", ".join(part.shown_as for part in self.parts)
        return f"{self.compose}({inner})" if self.parts else self.judge or shown_name(self.name)

    def of_part(self, part: RewardPart) -> RewardSpec:
        """Return a reward section with `part` as the only reward. Raises ValueError if the part is a judge."""
        if part.name is None:
            raise ValueError(f"part {part.shown_as!r} is a judge and has no reward function")
        return RewardSpec(
            name=part.name, answer=part.answer or self.answer, options=part.options, timeout_s=self.timeout_s
        )


def _is_named(name: str | None, answer: str) -> bool:
    """Return whether the spec sets another answer field than the default, and the reward `name` may read it."""
    return answer != DEFAULT_ANSWER and name not in ("regex", "length", "environment", "agent")


class ScoringSpec(Section):
    """The processes that run reward functions, on each controller's node."""

    workers: PositiveInt = Field(1, le=256, description="Processes on each node. Each scores one response at a time")
    memory_mb: PositiveInt = Field(4096, ge=64, le=1 << 30, description="Memory limit of one process, in MiB")
    start_timeout_s: PositiveFloat = Field(
        120.0, le=3600, description="Maximum time for a process to load the rewards, in seconds"
    )


JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,30}[A-Za-z0-9])?$")]

KEY = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+)$"
"""Regular expression for env:NAME and file:/PATH. Has no length bound, because the regex compiler expands a bound of thousands to 8 MB in every daemon."""

MOST_JUDGES = 16
MOST_WORDS = 64
LONGEST_TEMPLATE = 20_000
MOST_VOTES = 64

LEAST_RATE = 0.001
"""Requests per second. A lower rate (less than one request in 1,000 s) is certainly a mistake."""

OWN_PARSERS = ("number", "words", "json")
"""Built-in verdict parsers, in `gcore.verdicts`."""


class JudgeModel(Section):
    """A judge model that the cluster serves."""

    path: ModelPath = Field(
        description="Folder of a Hugging Face model with its tokenizer, relative to the spec's folder. Or a model on a hub: "
        "hf://OWNER/NAME[@REVISION], ms://OWNER/NAME[@REVISION]"
    )
    trust_remote_code: bool = Field(False, description="Run Python code from the model's folder. Read that code first")
    max_length: PositiveInt | None = Field(
        None, description="Maximum length of input plus output, in tokens. Default: the model's own limit"
    )


class JudgeServing(Section):
    """The engines that serve a judge's model: their kind, number, size and memory."""

    engine: Literal["torch", "sglang", "vllm", "hf"] = Field("torch", description="Engine that serves the judge")
    slots_per_engine: SlotsPerEngine = Field(1, description=f"{SPANS}. Must be equal for all judges")
    replicas: PositiveInt | None = Field(
        None,
        le=MOST_SLOTS,
        description="Engines of this judge in the cluster. Default: one on each slot of the reward pool",
    )
    batch_slots: PositiveInt = Field(64, description="Maximum number of sequences that an engine decodes at once")
    cache_tokens: PositiveInt | None = Field(
        None, description="Size of an engine's KV cache, in tokens. Default: from the free memory"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Input tokens that an engine prefills between two decoding steps"
    )
    engine_args: tuple[str, ...] = Field((), description="Additional command-line arguments of SGLang or vLLM")

    @model_validator(mode="after")
    def _check_engine(self) -> JudgeServing:
        settings = {
            "engine_args": ("arguments", bool(self.engine_args)),
            "slots_per_engine": ("several_slots", self.slots_per_engine > 1),
        }
        for why in lacking(ENGINES, "engine", self.engine, settings):
            raise ValueError(why)
        return self


def _address(url: str) -> str:
    """Return `url` if it is a usable base address. Raises ValueError."""
    if not url.isprintable() or " " in url:
        raise ValueError("an address must not contain spaces or unprintable characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"it is not a valid address ({error})") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError("it should begin with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "it should contain no user name and no password, because specs are stored and displayed; say in `key` where the key is"
        )
    if not host or port == 0:
        raise ValueError(f"it has no valid {'port' if host else 'host'}; write it as in https://api.example.com/v1")
    if "?" in url or "#" in url:
        raise ValueError("it should contain no ? and no #, because gcore appends /chat/completions")
    return url


class ExternalJudge(Section):
    """A judge outside the cluster with an OpenAI chat-completions API."""

    url: Annotated[str, AfterValidator(_address)] = Field(
        description="Base address, such as https://api.example.com/v1. Requests go to /chat/completions below it"
    )
    model: str = Field(description="Model name in requests")
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None,
        description="Environment variable of the controllers that holds the API key. The key itself is never stored",
    )
    key: Annotated[str, Field(pattern=KEY, max_length=4006)] | None = Field(
        None,
        description="Where controllers find the API key: env:NAME (an environment variable) or file:/PATH. Never the key itself",
    )
    requests_per_s: Annotated[float, Field(ge=LEAST_RATE)] = Field(
        10.0, description="Maximum number of requests per second from the whole cluster"
    )
    in_flight: PositiveInt = Field(32, description="Maximum number of requests in flight from one controller")
    price_in: Annotated[float, Field(ge=0)] = Field(0.0, description="Price of a million input tokens")
    price_out: Annotated[float, Field(ge=0)] = Field(0.0, description="Price of a million output tokens")
    most_cost: PositiveFloat | None = Field(
        None, description="Spending limit of the whole job, in the unit of the prices. At the limit the job waits"
    )

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `key` when unset, so that daemons of an older gcore can read the spec."""
        tree: dict[str, Any] = written(self)
        return tree if self.key is not None else {name: value for name, value in tree.items() if name != "key"}

    @property
    def key_reference(self) -> str | None:
        """Where controllers find the API key, as env:NAME or file:/PATH; None if the judge needs none."""
        return f"env:{self.key_env}" if self.key_env is not None else self.key

    @model_validator(mode="after")
    def _check_key(self) -> ExternalJudge:
        if self.key is not None and self.key_env is not None:
            raise ValueError("key and key_env are both set; leave one out")
        return self

    @model_validator(mode="after")
    def _check_prices(self) -> ExternalJudge:
        if self.most_cost is not None and not (self.price_in or self.price_out):
            raise ValueError("most_cost needs price_in or price_out; set one of them")
        return self


class VerdictSpec(Section):
    """How a judge's output becomes a number."""

    parser: str = Field(
        "number",
        description="Parser, by entry-point name in `gcore.verdicts`. number: the last number in the output. words: one of `words`. "
        "json: a field of the last JSON object",
    )
    after: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Read only the output after the last occurrence of this text. Output without it cannot be read",
    )
    words: dict[str, float] = Field(
        {}, max_length=MOST_WORDS, description="Accepted words and their values, with parser: words or json"
    )
    field: str = Field("score", description="With parser: json, the field with the number or one of `words`")
    least: float = Field(0.0, description="Smallest valid number")
    most: float = Field(1.0, description="Largest valid number")
    scale: bool = Field(False, description="Map numbers linearly from least..most to 0..1")
    options: dict[str, Option] = Field({}, description="Settings of a parser of your own, by name")

    @model_validator(mode="after")
    def _check_fields(self) -> VerdictSpec:
        if self.least >= self.most:
            raise ValueError(f"least ({self.least:g}) is not below most ({self.most:g}); lower least, or raise most")
        if self.scale and math.isinf(self.most - self.least):
            raise ValueError(
                f"the range from least ({self.least:g}) to most ({self.most:g}) is too large to scale; narrow it, or leave scale out"
            )
        if self.parser == "words" and not self.words:
            raise ValueError("parser: words needs words, such as words: {Y: 1, N: 0}")
        if self.parser == "number" and self.words:
            raise ValueError("words need parser: words or parser: json, not number; set one, or leave words out")
        if "" in self.words:
            raise ValueError("a word of a verdict cannot be empty; remove it")
        for word, worth in self.words.items():
            if not self.least <= worth <= self.most:
                raise ValueError(
                    f"the word {word!r} has value {worth:g}, which is not between least ({self.least:g}) and most ({self.most:g})"
                )
        if self.options and self.parser in OWN_PARSERS:
            raise ValueError(f"parser: {self.parser} has no options, which are for parsers of your own; leave them out")
        return self


class Fallback(Section):
    """Value of a judge's `on_error`: the reward function that scores a response if the judge fails."""

    fallback: str = Field(description="Reward, by entry-point name in `gcore.rewards`")
    options: dict[str, Option] = Field({}, description="Settings of that reward, by name")


class JudgeSpec(Section):
    """A model that scores responses. The cluster serves it (`model`, or an `adapter` of the policy's model), or it is
    outside the cluster (`external`)."""

    name: JudgeName = Field(description="Name of the judge in rewards, metrics and views")
    kind: Literal["generative", "classifier"] = Field(
        "generative",
        description="Kind of model. generative: the judge writes text, which `verdict` parses. classifier: a sequence-classification head returns "
        "one number",
    )
    model: JudgeModel | None = Field(None, description="The model, if the cluster serves the judge")
    adapter: FilePath | None = Field(
        None,
        exclude_if=is_unset,
        description="Folder of a PEFT adapter (LoRA) of the policy's model, relative to the spec's folder. The policy's own engines serve "
        "it beside the policy. Needs train.lora with publish: adapter",
    )
    serving: JudgeServing = Field(JudgeServing(), description="The engines that serve the judge")
    external: ExternalJudge | None = Field(None, description="The API of a judge outside the cluster")
    mode: Literal["pointwise", "pairwise"] = Field(
        "pointwise",
        description="How responses are judged. pointwise: each response alone. pairwise: two responses of a group at a time, "
        "each pair in both orders; a response's value is its win rate",
    )
    opponents: PositiveInt | None = Field(
        None,
        description="With pairwise: how many other responses each response is compared with. Default: all of its group",
    )
    template: Annotated[str, Field(max_length=LONGEST_TEMPLATE)] | None = Field(
        None,
        description="Input of the judge, in Jinja, from `prompt`, `response` (pairwise: `first` and `second`) and the entry's `fields`",
    )
    template_file: FilePath | None = Field(
        None, description="Jinja file with the template, relative to the spec's folder"
    )
    images: bool = Field(
        False,
        exclude_if=lambda images: not images,
        description="Show the judge pictures: a vision-language model, or a classifier with a vision part. "
        "`images` or `prompt` in the template has those of the prompt. `response`, or `response_images`, has those that tools returned "
        "in the response, or the picture that the policy generated",
    )
    chat: bool = Field(
        False, description="Apply the tokenizer's chat template to the input; false: the input is plain text"
    )
    system: str | None = Field(None, description="System message before the input. Needs chat, or an external judge")
    template_variables: TemplateVariables | None = Field(
        None, exclude_if=is_unset, description=f"{VARIABLES_HELP}. Needs chat: true and a judge with a model"
    )
    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(
        0.0,
        description="Sampling temperature. 0: greedy. Above 0: sampled, with a separate seed for each vote",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling")
    max_new_tokens: PositiveInt = Field(256, description="Maximum length of an output, in tokens")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Strings that end the output")
    votes: Annotated[int, Field(ge=1, le=MOST_VOTES)] = Field(
        1, description="Outputs per input. The verdict is the mean of those that can be parsed"
    )
    verdict: VerdictSpec = VerdictSpec()
    on_error: Literal["retry", "fail_group"] | Fallback = Field(
        "retry",
        description="What happens if requests fail or no output can be parsed. retry: the prompt is sampled again "
        "(flow.max_reissues). fail_group: the prompt fails. {fallback: NAME}: that reward scores instead",
    )
    tries: PositiveInt = Field(3, description="Engines or requests to try for one input before on_error applies")
    timeout_s: PositiveFloat = Field(
        120.0,
        le=3600,
        description="External judge: longest wait for a response, in seconds. Judge of the cluster: longest time without any data from "
        "its engine, in seconds; includes the engine's queue before this input",
    )
    remembered: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        10_000, description="Inputs whose verdicts each controller caches. The same input is not sent again"
    )
    queue: PositiveInt = Field(
        1024,
        description="Maximum number of open inputs of one controller. At the limit the controller starts no further prompts",
    )

    @model_validator(mode="after")
    def _check_fields(self) -> JudgeSpec:
        named = [name for name in ("model", "adapter", "external") if getattr(self, name) is not None]
        if len(named) != 1:
            found = f"{' and '.join(named)} are set" if named else "none is set"
            raise ValueError(f"a judge needs either model, adapter or external, but {found}")
        if (self.template is None) == (self.template_file is None):
            both = "both are set" if self.template is not None else "neither is set"
            raise ValueError(f"a judge needs either template or template_file, but {both}")
        if self.model is None and self.serving != JudgeServing():
            owner = (
                "an external judge has its own engines"
                if self.adapter is None
                else "the policy's engines serve adapters"
            )
            raise ValueError(f"serving needs a judge with a model, and {owner}; leave serving out")
        if self.system is not None and not (self.chat or self.external is not None):
            raise ValueError("system needs a chat template or an external judge; set chat: true, or leave system out")
        if self.template_variables and not (self.chat and self.external is None):
            raise ValueError("template_variables need a chat template: set model and chat: true, or leave them out")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature {self.temperature} must be 0 (greedy) or at least 1e-06")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes is {self.votes} with temperature 0, which gives the same output each time; set a temperature, or votes: 1"
            )
        if self.opponents is not None and self.mode != "pairwise":
            raise ValueError(f"opponents need mode: pairwise, not {self.mode}; set it, or leave opponents out")
        told = self.verdict
        if self.mode == "pairwise" and not told.scale and (told.least < 0 or told.most > 1):
            raise ValueError(
                f"mode: pairwise needs verdicts from 0 (second is better) to 1 (first is better), but verdict gives {told.least:g} to "
                f"{told.most:g}; set verdict.scale: true"
            )
        if self.kind == "classifier":
            self._refuse_for_classifier()
        if self.images:
            self._refuse_for_images()
        return self

    def _refuse_for_images(self) -> None:
        if self.adapter is not None:
            raise ValueError("images needs a judge with a model, and adapters support no pictures; leave images out")
        if self.external is not None:
            return
        for why in lacking(ENGINES, "serving.engine", self.serving.engine, {"images": ("judge_pictures", True)}):
            raise ValueError(why)

    def _refuse_for_classifier(self) -> None:
        if self.model is None:
            raise ValueError(
                f"kind: classifier needs a model; {'an external judge' if self.adapter is None else 'an adapter'} must be generative"
            )
        settings = {"kind: classifier": ("classifiers", True)}
        for why in lacking(ENGINES, "serving.engine", self.serving.engine, settings):
            raise ValueError(why)
        if self.mode == "pairwise":
            raise ValueError("kind: classifier scores each response alone and cannot compare pairs; leave mode out")
        for name in ("temperature", "top_p", "max_new_tokens", "stop", "votes", "verdict"):
            if getattr(self, name) != JudgeSpec.model_fields[name].default:
                raise ValueError(f"{name} needs kind: generative; a classifier returns one number. Leave {name} out")


def picture_reward_problems(rewards: Iterable[tuple[str, RewardSpec]], judges: Sequence[JudgeSpec]) -> Iterator[str]:
    """Yield a sentence for each reward that cannot score the pictures of a policy that generates pictures: a built-in one, which
    reads text, or a judge that sees no pictures. `rewards`: by the name of the source that they score. `judges`: of the spec.
    """
    fix = "use a reward of your own that opens response.picture, or a judge with images: true"
    for source, reward in rewards:
        names = [part.name for part in reward.parts] if reward.parts else [None if reward.judge else reward.name]
        for name in names:
            if name in TEXT_REWARDS:
                yield f"reward {name!r} of source {source!r} reads text, but the policy generates pictures; {fix}"
    for number, judge in enumerate(judges):
        if isinstance(judge.on_error, Fallback) and judge.on_error.fallback in TEXT_REWARDS:
            yield (
                f"judges.{number}.on_error.fallback is {judge.on_error.fallback!r}, which reads text, but the policy generates "
                f"pictures; {fix}"
            )
        if not judge.images and judge.adapter is None:
            yield (
                f"judge {judge.name!r} sees no pictures, but the policy generates pictures; set judges.{number}.images: true"
            )


def group_reward_problems(rewards: Iterable[tuple[str, RewardSpec]], samples: int) -> Iterator[str]:
    """Yield a sentence for each reward that compares the responses of a group if groups have one. `rewards`: by the name of
    the source that they score. `samples`: responses in a group."""
    for source, reward in rewards:
        if reward.compares_group and samples < 2:
            yield (
                f"the reward of source {source!r} has compose: {reward.compose}, which compares the responses to one prompt, but "
                f"flow.samples_per_prompt is {samples}; use at least 2, or compose: sum"
            )
