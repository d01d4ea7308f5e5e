"""What a person is told of a job's model before it runs: what would be downloaded, and which foreign code would run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.config.spec import ModelSpec
    from gcore.models.resolve import HubAnswer


def download_sentence(path: str, answer: HubAnswer) -> str:
    """`hf://own/tiny is commit 0123456789ab: 7 files, 3.4 GB, of which 1.2 GB are here`."""
    return (
        f"{path} is commit {answer.commit[:12]} on {answer.hub}: {len(answer.files)} files, {amount(answer.total)}, "
        f"of which {amount(answer.here)} are here; each node fetches the rest into its cache."
    )


def download_tree(answer: HubAnswer) -> dict[str, Any]:
    """For JSON; sizes in bytes."""
    return {
        "hub": answer.hub,
        "commit": answer.commit,
        "files": {file.name: file.size for file in answer.files},
        "bytes": answer.total,
        "here": answer.here,
    }


def trust_warning(model: ModelSpec) -> str | None:
    """Said whenever a spec trusts code that comes with a model; None for one that does not."""
    if not model.trust_remote_code:
        return None
    return (
        f"warning: model.trust_remote_code is set: Python code that comes with {model.path} may run in every engine "
        "and rank, with all that your account may do."
    )


def amount(size: int) -> str:
    """`3.4 GB`, `120 kB`; decimal units, as hubs show them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
