"""The task of the example of generated pictures: its prompts, and when a picture is right.

A picture has one quadrant in a colour; the others are grey. The rule is that of the reward in `examples/pictures/rules.py`,
for many pictures at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {
    "red": (0.8, -0.7, -0.7),
    "green": (-0.7, 0.6, -0.6),
    "blue": (-0.6, -0.4, 0.8),
    "yellow": (0.8, 0.7, -0.7),
}
"""Names and RGB values of the colours; -1 is black, 1 is white."""

PLACES = ("northwest", "northeast", "southwest", "southeast")
"""Names of the quadrants, row by row."""

SIDE = 8
"""Width and height of a picture in pixels."""

LEAST_LIGHT, FARTHEST = 0.35, 0.5
"""Least value of the brightest quadrant's largest channel, and largest squared distance of its colour from the asked one."""

RIGHT_BAND = (0.2, 0.4)
"""Range of the share of right pictures before RL."""

LEAST_PART = 0.35
"""Least share of pictures with the right colour, and with the right place, before RL. By chance it is 0.25."""


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """What a prompt asks for."""

    colour: str
    place: str

    @property
    def prompt(self) -> str:
        """The text of the prompt."""
        return f"{self.colour} {self.place}"


PROMPTS = tuple(PicturePrompt(colour, place) for colour in COLOURS for place in PLACES)
"""All prompts."""


def picture_parts(pictures: Any, prompts: Sequence[PicturePrompt]) -> tuple[Any, Any]:
    """Whether each picture has the colour, and the place, that its prompt asks for: two arrays [n] of bool.

    `pictures` [n, SIDE, SIDE, 3], uint8. A picture without one clearly brightest quadrant has neither.
    """
    import numpy as np

    colours, places = picture_contents(pictures)
    names = list(COLOURS)
    return (
        colours == np.array([names.index(one.colour) for one in prompts]),
        places == np.array([PLACES.index(one.place) for one in prompts]),
    )


def picture_contents(pictures: Any) -> tuple[Any, Any]:
    """The numbers of the colour and of the place that each picture shows, or -1 if it shows none: two arrays [n].

    `pictures` [n, SIDE, SIDE, 3], uint8.
    """
    import numpy as np

    half = SIDE // 2
    cells = np.asarray(pictures).reshape(-1, 2, half, 2, half, 3)
    quadrants = cells.mean((2, 4)).reshape(-1, 4, 3) / 127.5 - 1  # means of whole numbers are exact, in any order
    light = quadrants.max(2)
    rows, order = np.arange(len(light)), np.argsort(-light, axis=1)
    brightest = order[:, 0]
    first, second = light[rows, brightest], light[rows, order[:, 1]]
    is_clear = (first > LEAST_LIGHT) & (second < first / 2)
    shades = quadrants[rows, brightest]
    distances = ((shades[:, None] - np.array(list(COLOURS.values()))) ** 2).sum(2)
    nearest = distances.argmin(1)
    has_colour = is_clear & (distances[rows, nearest] < FARTHEST)
    return np.where(has_colour, nearest, -1), np.where(is_clear, brightest, -1)


def make_entries(count: int, seed: int) -> list[PicturePrompt]:
    """Return `count` prompts that go through all prompts again and again, each time in another order."""
    import numpy as np

    draw = np.random.default_rng(seed)
    rounds = -(-count // len(PROMPTS))
    return [PROMPTS[place] for _ in range(rounds) for place in draw.permutation(len(PROMPTS))][:count]


@dataclass(frozen=True, slots=True)
class PictureShares:
    """Shares of pictures that are right, that have the right colour, and that have the right place."""

    right: float
    colour: float
    place: float

    @staticmethod
    def of(pictures: Any, prompts: Sequence[PicturePrompt]) -> PictureShares:
        """Shares of `pictures` [n, SIDE, SIDE, 3], uint8, generated for these prompts."""
        colour, place = picture_parts(pictures, prompts)
        return PictureShares(float((colour & place).mean()), float(colour.mean()), float(place.mean()))

    @property
    def fit(self) -> bool:
        """Whether the model is as the example needs it: often careless, but about both parts better than chance."""
        return RIGHT_BAND[0] <= self.right <= RIGHT_BAND[1] and min(self.colour, self.place) >= LEAST_PART
