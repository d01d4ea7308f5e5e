"""The index of a source's pictures: what it knows, what it reads again, and what it refuses."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from picture_files import encoded, picture

from gcore.errors import DataError
from gcore.media import picture_index
from gcore.media.picture_index import (
    PictureChanged,
    PictureIndex,
    PictureRoots,
    open_picture_index,
    read_verified,
)
from gcore.media.pictures import PictureError


class Source:
    """A data folder whose entries each name one picture."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        self.cache = folder / "cache" / "pictures.index"
        self.names: list[str] = []
        self.version = "1"
        self.asked = 0
        self.told: list[tuple[int, int]] = []

    def add(self, name: str, width: int = 12, height: int = 8) -> Path:
        self.names.append(name)
        file = self.data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(width, height), "JPEG" if name.endswith("jpg") else "PNG"))
        return file

    def open(self) -> PictureIndex:
        def named() -> Iterator[tuple[str, int]]:
            self.asked += 1
            return ((name, entry) for entry, name in enumerate(self.names))

        return open_picture_index(
            self.cache,
            PictureRoots(self.data),
            self.version,
            named,
            lambda entry: f"data.jsonl, entry {entry}",
            progress=lambda done, total: self.told.append((done, total)),
        )


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pictures whose content was read."""
    seen: list[bytes] = []
    inspect = picture_index.inspect_picture

    def counted(data: bytes, **options: int) -> object:
        seen.append(data)
        return inspect(data, **options)

    monkeypatch.setattr(picture_index, "inspect_picture", counted)
    return seen


def test_the_index_knows_digest_and_size_of_every_picture(source: Source) -> None:
    for number in range(200):
        source.add(f"p{number % 7}/{number}.{'jpg' if number % 2 else 'png'}", 10 + number, 90)
    source.names += ["./p0/0.png", str(source.data / "p1/1.jpg")]
    index = source.open()
    assert len(index) == 200
    for entry, name in enumerate(source.names):
        path, known = index.find(name)
        data = (source.data / name).read_bytes()
        assert path.read_bytes() == data == read_verified(path, known.sha256)
        assert known.sha256 == hashlib.sha256(data).hexdigest()
        assert (known.width, known.height, known.identity.size) == (10 + known.entry, 90, len(data))
        assert known.entry == entry % 200
        index.verify(name)
    assert source.told[-1] == (200, 200)
    assert [done for done, _ in source.told] == sorted({done for done, _ in source.told})


def test_pictures_are_read_again_only_if_they_changed_and_names_only_if_the_data_did(
    source: Source, read: list[bytes]
) -> None:
    files = [source.add(f"{number}.png") for number in range(5)]
    first = source.open()
    assert (len(read), source.asked) == (5, 1)
    assert source.open().digest == first.digest
    assert (len(read), source.asked) == (5, 1)
    os.utime(files[2], ns=(1, 1))
    assert source.open().digest == first.digest
    assert (len(read), source.asked) == (6, 1)
    source.open()
    assert len(read) == 6, "the new time is in the cache"
    files[3].write_bytes(encoded(picture(13, 8)))
    assert source.open().digest != first.digest
    assert (len(read), source.asked) == (7, 1)
    source.add("5.png")
    source.version = "2"
    assert len(source.open()) == 6
    assert (len(read), source.asked) == (8, 2)
    assert sorted(path.name for path in source.cache.parent.iterdir()) == [source.cache.name], "no temporary file"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\n".join(text.splitlines()[:-1]),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: "[]",
        lambda text: "\0",
        lambda text: "",
    ],
)
def test_a_damaged_cache_is_made_again(source: Source, read: list[bytes], damage: Callable[[str], str]) -> None:
    source.add("a.png")
    source.add("b.png")
    digest = source.open().digest
    source.cache.write_text(damage(source.cache.read_text()))
    assert source.open().digest == digest
    assert len(read) == 4


def test_the_digest_is_of_paths_content_and_sizes_and_of_nothing_else(tmp_path: Path) -> None:
    digests = []
    for number, names in enumerate((["a.png", "b/c.png"], ["b/c.png", "./a.png"], ["a.png", "c.png"], ["a.png"])):
        (tmp_path / str(number)).mkdir()
        source = Source(tmp_path / str(number))
        for name in names:
            source.add(name)
        digests.append(source.open().digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert len(digests[0]) == 32


def test_a_picture_that_changes_after_it_was_indexed_is_noticed(source: Source) -> None:
    file = source.add("a.png")
    index = source.open()
    data = file.read_bytes()
    os.utime(file, ns=(1, 1))
    index.verify("a.png")  # only its time
    file.write_bytes(encoded(picture(13, 8)))
    with pytest.raises(PictureChanged, match=r"a\.png: the picture changed after it was checked.*Restore the file"):
        index.verify("a.png")
    file.write_bytes(data)
    index.verify("a.png")
    file.unlink()
    with pytest.raises(PictureError, match="does not exist"):
        index.verify("a.png")
    with pytest.raises(PictureError, match="not in the index"):
        index.verify("b.png")


def test_all_pictures_that_cannot_be_used_are_reported_with_the_entries_that_name_them(source: Source) -> None:
    for number in range(30):
        source.add(f"{number}.png")
    (source.data / "7.png").unlink()
    (source.data / "9.png").write_bytes(b"GIF89a")
    (source.data / "11.png").write_bytes(b"")
    source.names.append("http://example.com/a.png")
    with pytest.raises(DataError) as caught:
        source.open()
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 pictures cannot be used"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        f"data.jsonl, entry {entry}" for entry in (7, 9, 11, 30)
    ]
    assert "does not exist" in lines[1]
    assert "not a PNG" in lines[2]
    assert not source.cache.exists()
    for number in range(20):
        (source.data / f"{number}.png").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"and 13 more"):
        source.open()


def test_a_single_unusable_picture_is_named_in_one_sentence(source: Source) -> None:
    source.names = ["a.png"]
    with pytest.raises(DataError, match=r"^a picture cannot be used\. data\.jsonl, entry 0: /.*a\.png: .* not exist"):
        source.open()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://example.com/a.png", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("data:image/png;base64,AAAA", r"is a URL.*Write the picture to a file"),
        ("iVBO" * 1025, r"has 4,100 characters \('iVBO[^/]{56}'\.\.\.\); .*Write the picture to a file"),
        ("../secret.png", "outside the data's folder"),
        ("b/../../secret.png", "outside the data's folder"),
        ("/etc/passwd", "outside the data's folder"),
        ("{data}-other/a.png", "outside the data's folder"),
        ("{data}/../secret.png", "outside the data's folder"),
        ("link.png", "outside the data's folder"),
        ("folder/secret.png", "outside the data's folder"),
        ("a\0.png", "outside the data's folder"),
        ("", "is a folder|outside"),
        ("sha256/a.png", "does not exist"),
    ],
)
def test_a_name_that_leaves_the_folder_of_the_data_is_refused(source: Source, name: str, message: str) -> None:
    secret = source.data.parent / "secret.png"
    secret.write_bytes(encoded(picture()))
    (source.data / "link.png").symlink_to(secret)
    (source.data / "folder").symlink_to(source.data.parent)
    source.names = [name.replace("{data}", str(source.data))]
    with pytest.raises(DataError, match=message):
        source.open()


def test_links_within_the_folder_and_a_linked_folder_of_data_are_followed(tmp_path: Path) -> None:
    source = Source(tmp_path)
    source.add("a.png")
    (source.data / "b.png").symlink_to("a.png")
    source.names.append("b.png")
    (tmp_path / "there").symlink_to(source.data)
    source.data = tmp_path / "there"
    index = source.open()
    assert index.find("a.png")[1].sha256 == index.find("b.png")[1].sha256


def test_pictures_that_a_conversion_wrote_are_in_their_own_folder(tmp_path: Path) -> None:
    written = tmp_path / "copy.pictures"
    (written / "sha256").mkdir(parents=True)
    (written / "sha256/ab.png").write_bytes(encoded(picture()))
    (tmp_path / "secret.png").write_bytes(encoded(picture()))
    (written / "sha256/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(encoded(picture()))
    roots = PictureRoots(tmp_path / "data", written)

    def opened(*names: str) -> PictureIndex:
        return open_picture_index(
            tmp_path / "index", roots, "-".join(names), lambda: [(name, 0) for name in names], str
        )

    index = opened("a.png", "sha256/ab.png")
    assert index.find("sha256/ab.png")[0] == written / "sha256/ab.png"
    for name in ("sha256/link.png", "sha256/../../secret.png"):
        with pytest.raises(DataError, match="outside the data's folder"):
            opened(name)
