"""The reward of this example: whether a generated picture shows the colour and the place that its prompt asks for."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from gcore.reward.api import Response, RewardResult

COLOURS = {
    "red": (0.8, -0.7, -0.7),
    "green": (-0.7, 0.6, -0.6),
    "blue": (-0.6, -0.4, 0.8),
    "yellow": (0.8, 0.7, -0.7),
}
"""RGB values from -1 (black) to 1 (white)."""

PLACES = ("northwest", "northeast", "southwest", "southeast")
"""The quadrants of a picture, row by row."""


def right_picture(response: Response, fields: Mapping[str, Any]) -> RewardResult:
    """Return 1 if one quadrant is clearly the brightest, is the one that `fields["place"]` names, and is nearest to the
    colour that `fields["colour"]` names; otherwise 0. The parts say which of both is right."""
    with Image.open(response.picture) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
    means = np.array([pixels[y : y + height, x : x + width].mean((0, 1)) for y in (0, height) for x in (0, width)])
    quadrants = means / 127.5 - 1
    light = quadrants.max(1)
    second, first = np.argsort(light)[-2:]
    is_clear = light[first] > 0.35 and light[second] < light[first] / 2
    distances = {name: float(((quadrants[first] - shade) ** 2).sum()) for name, shade in COLOURS.items()}
    nearest = min(distances, key=lambda name: distances[name])
    colour = bool(is_clear and nearest == fields["colour"] and distances[nearest] < 0.5)
    place = bool(is_clear and PLACES[first] == fields["place"])
    return RewardResult(float(colour and place), (("colour", float(colour)), ("place", float(place))))
