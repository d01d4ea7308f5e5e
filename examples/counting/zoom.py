"""The tool of zoom.yaml: one of the four panels of the prompt's picture, in full size."""

import io
import re

from PIL import Image

from gcore.rollout.environments.api import BadArgument, ToolResult


def zoom(argument: str, pictures: tuple[str, ...]) -> ToolResult:
    """Return the panel that `argument` names, "3r": its number, and the letter of the colour that the model asks for."""
    if not re.fullmatch(r"[1-4][rgby]", argument):
        raise BadArgument("a call names a panel from 1 to 4 and a colour, r, g, b or y")
    row, column = divmod(int(argument[0]) - 1, 2)
    picture = Image.open(pictures[0])
    height, width = picture.height // 2, picture.width // 2
    file = io.BytesIO()
    picture.crop((column * width, row * height, (column + 1) * width, (row + 1) * height)).save(file, "PNG")
    return ToolResult(argument[1], [file.getvalue()])
