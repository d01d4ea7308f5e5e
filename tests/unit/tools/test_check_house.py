"""The checker of the module tree finds each kind of violation, once planted in a small tree that is otherwise clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import check_house
from tools.check_house import House, Limits, check, report

LIMITS = Limits(
    generated=("gcore/wire",),
    lines=20,
    small=8,
    entries=5,
    entries_of={"gcore/store": 4},
    modules_of={"gcore": 6, "controllers": 4, "placement": 4},
)
LONG_ENOUGH = "\nREST = 1\n" + "\n" * 6
"""So that a module is no face and not small."""

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the tree; the clean tree is there already."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("gcore/__init__.py", "")
    write("gcore/store/__init__.py", '"""The store."""\nfrom gcore.store.types import Store\n__all__ = ["Store"]\n')
    write("gcore/store/types.py", "class Store: ...\n")
    write("gcore/store/etcd.py", "from gcore.store import Store\n" + LONG_ENOUGH)
    write("gcore/wire/made_pb2.py", "class Store: ...\n" + "\n" * 100)
    write("placement/__init__.py", "")
    write("placement/placer.py", "from gcore.store.types import Store\n" + LONG_ENOUGH)
    write("controllers/__init__.py", "")
    write(
        "controllers/job/runner.py",
        "from gcore.store import Store, etcd\nfrom placement import placer as plan\n" + LONG_ENOUGH,
    )
    return write


def errors(root: Path, exceptions: str = "") -> list[str]:
    file = root / "house.toml"
    file.write_text(exceptions)
    return check(root, LIMITS, file)


def only(root: Path) -> str:
    (error,) = errors(root)
    return error


def test_the_clean_tree_has_no_violation(tmp_path: Path, write: Write) -> None:
    assert errors(tmp_path) == []


def test_a_module_over_the_limit_is_found(tmp_path: Path, write: Write) -> None:
    write("gcore/errors.py", "\n" * 21)
    assert only(tmp_path).startswith("gcore/errors.py:1: 21 lines")


@pytest.mark.parametrize(
    "statement",
    [
        "from controllers.small import X",
        "from controllers import small",
        "from controllers import small as s",
        "from .small import X",
        "def f():\n    from controllers.small import X",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from controllers.small import X",
        "import importlib\nimportlib.import_module('controllers.small')",
    ],
)
def test_a_small_module_with_one_importer_is_found(tmp_path: Path, write: Write, statement: str) -> None:
    write("controllers/small.py", "X = 1\n")
    write("controllers/user.py", statement + LONG_ENOUGH)
    assert "one importer, controllers.user" in only(tmp_path)
    write("controllers/other.py", "import controllers.small\n" + LONG_ENOUGH)
    assert errors(tmp_path) == []


def test_an_import_through_faces_counts_for_the_defining_module(tmp_path: Path, write: Write) -> None:
    write("controllers/api/__init__.py", '"""Face."""\nfrom controllers.api.face import X\n')
    write("controllers/api/face.py", "from controllers.api.small import X\n__all__ = ['X']\n")
    write("controllers/api/small.py", "X = 1\n")
    write("controllers/user.py", "from controllers.api import X\n" + LONG_ENOUGH)
    assert only(tmp_path).startswith("controllers/api/small.py:1: 1 lines and one importer, controllers.user")


def test_a_module_that_only_a_face_imports_has_no_importer(tmp_path: Path, write: Write) -> None:
    write("controllers/api/__init__.py", '"""Face."""\nfrom controllers.api.small import X\n')
    write("controllers/api/small.py", "X = 1\n")
    assert errors(tmp_path) == []


def test_a_folder_with_too_many_entries_is_found(tmp_path: Path, write: Write) -> None:
    for name in ("memory", "keys", "session/__init__", "__main__"):
        write(f"gcore/store/{name}.py", "")
    write("gcore/store/scripts.lua", "")
    assert only(tmp_path).startswith("gcore/store: 5 entries, at most 4")


def test_an_alias_counts_neither_as_an_entry_nor_as_a_class_nor_as_an_importer(tmp_path: Path, write: Write) -> None:
    for name in ("a", "b", "c", "d"):
        write(f"gcore/store/{name}.py", '"""Alias until 0.3: see gcore.store.etcd."""\nclass Store: ...\n')
    assert errors(tmp_path) == []
    write("controllers/small.py", "X = 1\n")
    write("controllers/user.py", "from controllers.small import X\n" + LONG_ENOUGH)
    write("gcore/old.py", '"""Alias until 0.3: see controllers.small."""\nfrom controllers.small import X\n')
    assert "one importer, controllers.user" in only(tmp_path)


def test_a_program_in_a_package_that_is_an_alias_is_one_too(tmp_path: Path, write: Write) -> None:
    write("gcore/engines/main.py", "from gcore.store import etcd\n" + LONG_ENOUGH)
    write("gcore/store/engine/__init__.py", '"""Alias until 0.3: daemons start a program of this name."""\n')
    write("gcore/store/engine/__main__.py", "from gcore.engines.main import REST\n")
    assert errors(tmp_path) == []
    write("gcore/store/engine/__init__.py", '"""A program."""\n')
    assert "2 import one another: gcore.engines, gcore.store" in only(tmp_path)


def test_an_import_of_an_alias_is_found(tmp_path: Path, write: Write) -> None:
    write("gcore/old.py", '"""Alias until 0.3: see gcore.store.etcd."""\nfrom gcore.store.etcd import REST\n')
    write("controllers/user.py", "from gcore.old import REST\n" + LONG_ENOUGH)
    assert only(tmp_path).startswith("controllers/user.py:1: imports gcore.old, which is an alias")


def test_too_many_modules_are_found_and_faces_do_not_count(tmp_path: Path, write: Write) -> None:
    for folder in ("a", "b"):
        write(f"controllers/{folder}/__init__.py", "")
        for name in ("one", "two"):
            write(f"controllers/{folder}/{name}.py", "")
        write(f"controllers/{folder}/face.py", "from gcore.store import Store\n")
    assert only(tmp_path).startswith("controllers: 5 modules, at most 4")


@pytest.mark.parametrize(
    "source",
    [
        "class Store: ...",
        "class Other:\n    class Store: ...",
        "def make():\n    class Store: ...",
        "if True:\n    class Store: ...",
    ],
)
def test_a_public_class_name_with_two_definitions_is_found(tmp_path: Path, write: Write, source: str) -> None:
    write("gcore/errors.py", source)
    error = only(tmp_path)
    assert "public class Store is defined 2 times" in error
    assert "gcore/store/types.py:1" in error


@pytest.mark.parametrize(
    "source",
    [
        "class _Store: ...",
        "from gcore.store import Store\nREST = Store\n" + LONG_ENOUGH,
        "from gcore.store import Store as Base\nStore = Base\n" + LONG_ENOUGH,
        "if True:\n    class Own: ...\nelse:\n    class Own: ...",
    ],
)
def test_a_private_class_an_import_and_an_alternative_are_no_second_definition(
    tmp_path: Path, write: Write, source: str
) -> None:
    write("gcore/errors.py", source)
    assert errors(tmp_path) == []


@pytest.mark.parametrize(
    "back",
    [
        "from gcore.store import etcd",
        "def f():\n    from gcore.store.etcd import X",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gcore.store.etcd",
        "def f():\n    __import__('gcore.store.etcd')",
        "def f():\n    import importlib\n    importlib.import_module(name='gcore.store.etcd')",
        "def f():\n    from importlib import import_module as load\n    load('gcore.store.etcd')",
        "def f():\n    import gcore.store\n    return gcore.store.etcd.X",
    ],
)
def test_a_circle_of_modules_is_found(tmp_path: Path, write: Write, back: str) -> None:
    write("gcore/store/etcd.py", "from gcore.store.keys import Y\nX = 1\n" + LONG_ENOUGH)
    write("gcore/store/keys.py", back + "\nY = 1\n" + LONG_ENOUGH)
    assert only(tmp_path).endswith("[module-circle: gcore.store.etcd + gcore.store.keys]")


def test_a_circle_through_the_face_of_the_own_package_is_found(tmp_path: Path, write: Write) -> None:
    write("gcore/store/types.py", "from gcore.store import Store\nclass Store: ...\n")
    assert only(tmp_path).endswith("[module-circle: gcore.store + gcore.store.types]")


def test_a_circle_of_packages_is_found_where_no_modules_form_one(tmp_path: Path, write: Write) -> None:
    write("gcore/config/__init__.py", "")
    write("gcore/config/spec.py", "from gcore.store.types import Store\n" + LONG_ENOUGH)
    write("gcore/store/etcd.py", "import gcore.config.load\n" + LONG_ENOUGH)
    write("gcore/config/load.py", LONG_ENOUGH)
    assert only(tmp_path).endswith("[package-circle: gcore.config + gcore.store]")


def test_a_circle_of_packages_through_a_module_beside_them_is_found(tmp_path: Path, write: Write) -> None:
    write("gcore/config/__init__.py", "")
    write("gcore/config/spec.py", "from gcore.store.types import Store\n" + LONG_ENOUGH)
    write("gcore/store/etcd.py", "import gcore.plugins\n" + LONG_ENOUGH)
    write("gcore/plugins.py", "import gcore.config.load\n" + LONG_ENOUGH)
    write("gcore/config/load.py", LONG_ENOUGH)
    assert only(tmp_path).endswith("[package-circle: gcore.config + gcore.plugins + gcore.store]")


def test_modules_of_a_folder_and_its_subfolder_may_import_one_another(tmp_path: Path, write: Write) -> None:
    write("controllers/api/__init__.py", "")
    write("controllers/api/routes.py", "import controllers.job.runner\n" + LONG_ENOUGH)
    write("controllers/daemon/__main__.py", "import controllers.api.routes\n" + LONG_ENOUGH)
    assert errors(tmp_path) == []


EXCEPTION = '[[exception]]\nrule = "long-module"\nsubject = "gcore/errors.py"\nreason = "one table"\n'


def test_an_exception_lets_its_violation_pass_and_no_other(tmp_path: Path, write: Write) -> None:
    write("gcore/errors.py", "\n" * 21)
    assert errors(tmp_path, EXCEPTION) == []
    write("gcore/types.py", "\n" * 21)
    (error,) = errors(tmp_path, EXCEPTION)
    assert error.startswith("gcore/types.py:1")


def test_an_exception_that_is_not_needed_is_an_error(tmp_path: Path, write: Write) -> None:
    (error,) = errors(tmp_path, EXCEPTION)
    assert "gcore/errors.py: the exception is not needed" in error


def test_an_exception_without_a_reason_and_one_given_twice_are_errors(tmp_path: Path, write: Write) -> None:
    write("gcore/errors.py", "\n" * 21)
    (error,) = errors(tmp_path, EXCEPTION.replace("one table", ""))
    assert "give a reason" in error
    (error,) = errors(tmp_path, EXCEPTION * 2)
    assert "the exception is there 2 times" in error


def test_the_report_counts_modules_lines_and_statements(tmp_path: Path, write: Write) -> None:
    write("gcore/errors.py", '"""Errors."""\n\n\ndef f():\n    """Nothing."""\n    if True:\n        pass\n')
    printed = list(report(House(tmp_path, LIMITS)))
    heads = re.split(r"\s{2,}", printed[0])
    numbers = dict(zip(heads, next(line for line in printed if line.startswith("gcore ")).split(), strict=True))
    # types 1, etcd 9 and errors 7 lines; statements: 2 in types (class, ...), 2 in etcd, 3 in errors, 2 in the face.
    assert numbers["modules"] == "3"
    assert numbers["median lines"] == "7"
    assert numbers["lines"] == "17"
    assert numbers["statements"] == "9"
    assert numbers["all lines"] == "20"
    assert "circles of modules: 0" in printed


def test_the_program_prints_violations_and_exits_with_1(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_house.main(["--root", str(tmp_path)]) == 1  # by the product's limits, etcd is small
    assert "gcore/store/etcd.py:1: 9 lines and one importer, controllers.job" in capsys.readouterr().out
    assert check_house.main(["--report", "--root", str(tmp_path)]) == 0
    assert "circles of packages: 0" in capsys.readouterr().out
