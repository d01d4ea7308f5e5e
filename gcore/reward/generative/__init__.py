"""Generative reward models: judges, models that say what a response is worth.

`template` makes the questions, `verdicts` reads the answers, `votes` and `pairs` make one value of several, `remembered`
keeps them, and `judge` is what ties them together; what asks and what counts is handed in (`asking`). What a verdict parser
needs is exported here, and what whoever serves judges needs.
"""

from gcore.config.judges import JudgeSpec, VerdictSpec
from gcore.reward.generative.asking import Answer, Ask, Seen, Value, Why
from gcore.reward.generative.errors import JudgeAway, JudgeError, Unreadable
from gcore.reward.generative.judge import Judge
from gcore.reward.generative.template import Question
from gcore.reward.generative.verdicts import Parser, find_parser
from gcore.reward.generative.votes import Judgement

__all__ = [
    "Answer",
    "Ask",
    "Judge",
    "JudgeAway",
    "JudgeError",
    "JudgeSpec",
    "Judgement",
    "Parser",
    "Question",
    "Seen",
    "Unreadable",
    "Value",
    "VerdictSpec",
    "Why",
    "find_parser",
]
