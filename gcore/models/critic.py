"""Whether a critic's model (`train.critic.path`) can be started from, as far as that can be said without torch.

What fits the policy (its longest text, a head of one number) is found by the train ranks, when they load both.
"""

from __future__ import annotations

from pathlib import Path

from gcore.models.folder import check_code, check_weights, read_config
from gcore.models.names import ModelError
from gcore.models.weights import check_whole


def check_critic(path: str, *, trust_remote_code: bool) -> None:
    """Raises ModelError: no such folder, no model in it, weights that are missing, cut off or a pickle, code that would run."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        missing = "no model is here: there is no config.json" if folder.is_dir() else "the folder does not exist"
        raise ModelError(
            f"train.critic.path: {missing}",
            where=path,
            fix="Name the folder of a Hugging Face model in train.critic.path",
        )
    check_weights((file.name for file in folder.iterdir()), where=path)
    check_code(read_config(folder), trusted=trust_remote_code, where=path)
    check_whole(folder)
