"""GSM8K for gcore: `python examples/gsm8k/prepare.py --hub` (or `--from FOLDER`, or `--synthetic`).

The data set's files have the fields `question` and `answer`, and an answer is a worked solution that ends with "#### 42".
This writes train.jsonl and eval.jsonl with `prompt`, the question, and `answer`, the number alone. The solution is left
out, so that the model cannot memorize it. The folder is written completely or not at all.

    --hub          the data set openai/gsm8k from the Hugging Face hub (or another, by its name), through its own client
    --from FOLDER  local files, Parquet or JSON lines, such as train*.parquet and test*.parquet
    --synthetic    sums in words, in the same form, made here: enough to try everything, not to learn from
    --tiny-model   a small random model beside them, for a machine without a GPU

It needs pyarrow for Parquet, which comes with gcore, huggingface_hub for --hub, and torch for --tiny-model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore.errors import DataError, GcoreError
from gcore.reward.rules import number_after
from gcore.system.files import replace_folder

DEFAULT_TO = Path(".cache/examples/gsm8k")
HUB_DATA_SET = "openai/gsm8k"
MARKER = "####"
SPLITS = {"train": "train", "eval": "test"}
"""The names of our files, and how theirs begin."""
SYNTHETIC_COUNTS = {"train": 256, "eval": 32}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Row = Mapping[str, Any]


def entry_of(row: Row, where: str) -> dict[str, str]:
    """A line of ours from a row of theirs. Raises DataError for one that is not GSM8K's."""
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip() or not isinstance(solution, str):
        raise DataError("the row has no question, or no answer", where=where, fix="Name files of GSM8K")
    answer = number_after(solution, MARKER)
    if answer is None:
        raise DataError(f"the answer has no number behind {MARKER!r}", where=where, fix="Name files of GSM8K")
    return {"prompt": question.strip(), "answer": f"{answer:f}"}


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a Parquet file or one of JSON lines. Raises DataError."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(columns=["question", "answer"]):
                    yield from batch.to_pylist()
        else:
            with file.open(encoding="utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    yield row if isinstance(row, dict) else {}
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors, or have one as their base
        raise DataError(f"cannot read it ({error})", where=str(file), fix="Name a file of GSM8K") from error


def files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split, anywhere below `folder`. Raises DataError if there are none."""
    found = sorted(p for p in folder.rglob(f"{split}*") if p.suffix in (".parquet", ".jsonl") and p.is_file())
    if not found:
        raise DataError(
            f"there is no {split}*.parquet and no {split}*.jsonl", where=str(folder), fix="Name GSM8K's folder"
        )
    return found


def from_hub(name: str) -> Path:
    """The folder in the hub's cache with the data set's Parquet files. Raises DataError if the hub does not give them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["main/*.parquet"])) / "main"
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"the hub did not give {name!r} ({said})", fix="Check the name and the network, or use --from FOLDER"
        ) from error


def synthetic(count: int, first: int) -> Iterator[Row]:
    """Problems in the data set's form, all different: a number of packs, with so many in each, less what is given away."""
    names, things = ("Ada", "Ben", "Chiara", "Deniz", "Emre", "Fatou"), ("pencils", "apples", "marbles", "cards")
    for number in range(first, first + count):
        packs, each, given = 2 + number % 8, 3 + number // 8 % 9, 2 + number // 72  # no three numbers come twice
        name, thing = names[number % len(names)], things[number // 7 % len(things)]
        whole = packs * each
        yield {
            "question": f"{name} has {packs} packs of {each} {thing} and gives {given} {thing} away. "
            f"How many {thing} are left?",
            "answer": f"{name} has {packs}*{each}=<<{packs}*{each}={whole}>>{whole} {thing}.\n"
            f"Then {whole}-{given}=<<{whole}-{given}={whole - given}>>{whole - given} are left.\n{MARKER} {whole - given}",
        }


def write_entries(rows: Iterator[tuple[Row, str]], file: Path) -> int:
    """One JSON object a line; how many."""
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for row, where in rows:
            lines.write(json.dumps(entry_of(row, where), ensure_ascii=False) + "\n")
            count += 1
    return count


def numbered(files: Sequence[Path]) -> Iterator[tuple[Row, str]]:
    """Rows, and where each stands."""
    for file in files:
        for number, row in enumerate(rows_of(file), 1):
            yield row, f"{file}, row {number}"


def prepare(to: Path, source: Path | None, *, tiny_model: bool) -> dict[str, int]:
    """Write the folder; rows by file. `source` None: synthetic. Raises GcoreError."""
    if to.exists() and any(to.iterdir()) and not (to / "train.jsonl").is_file():
        raise DataError("the folder holds something else", where=str(to), fix="Name another with --to")
    counts, first = {}, 0
    with replace_folder(to, owner="gsm8k", durable=False) as draft:
        for ours, theirs in SPLITS.items():
            if source is None:
                made = ((row, "synthetic") for row in synthetic(SYNTHETIC_COUNTS[ours], first))
                first += SYNTHETIC_COUNTS[ours]
            else:
                made = ((row, where) for row, where in numbered(files_of(source, theirs)))
            counts[ours] = write_entries(made, draft / f"{ours}.jsonl")
        if tiny_model:
            print("prepare: making a small random model, which takes some seconds ...", flush=True)
            from transformers.utils import logging

            from gcore.testing.models import make_tiny_model

            logging.disable_progress_bar()
            make_tiny_model(draft / "tiny-model", hidden=64, context=1024)
            (draft / "tiny-model" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        elif (to / "tiny-model").is_dir():
            shutil.copytree(to / "tiny-model", draft / "tiny-model")
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description="Write GSM8K in gcore's form.", epilog="for example: --from ~/gsm8k, or --synthetic --tiny-model"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hub", nargs="?", const=HUB_DATA_SET, metavar="OWNER/NAME", help=f"default: {HUB_DATA_SET}")
    where.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="folder with its files")
    where.add_argument("--synthetic", action="store_true", help="made here")
    parser.add_argument("--tiny-model", action="store_true", help="a small random model too")
    parser.add_argument("--to", type=Path, default=DEFAULT_TO, help=f"default: {DEFAULT_TO}")
    chosen = parser.parse_args(arguments)
    try:
        source = from_hub(chosen.hub) if chosen.hub else chosen.folder
        counts = prepare(chosen.to, source, tiny_model=chosen.tiny_model)
    except GcoreError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{chosen.to}: {counts['train']} prompts to learn from, {counts['eval']} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
