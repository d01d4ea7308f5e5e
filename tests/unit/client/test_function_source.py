"""Functions of notebook cells and files, tried hard: each is copied into a module that gives the same results in a new process, or is
refused in a sentence.

A case is a list of cells, run one after the other in one namespace as a notebook does. The function is what the name `score` means afterwards.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import linecache
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore.client.function_source import function_name, function_source
from gcore.errors import UsageError
from gcore.plugins import MOST_FILE_BYTES

RESPONSES = ["", "a/ab12", "Ärger 7", "12"]

COPIED = {
    "plain": ["def score(response): return float(len(response))"],
    "constants of every kind": [
        "LIMIT, NAME, T, D = 3, 'ä', (1,), {'a': (1, 2.5), 'b': [None, True], 'c': {1, 2}, 'd': frozenset({3}), 'e': b'x'}",
        "def score(response): return LIMIT + len(NAME) + T[0] + D['a'][1] + len(D['c'] | D['d']) + len(D['e'])",
    ],
    "infinity and nan": [
        "BOUNDS = (float('-inf'), float('inf'), float('nan'), 1e400 + 2j)",
        "def score(response): return min(max(BOUNDS[0], len(response)), BOUNDS[1]) + (BOUNDS[2] != BOUNDS[2])",
    ],
    "a pattern with flags": [
        "import re\nDIGITS = re.compile(r'[a-z]+', re.IGNORECASE)",
        "def score(response): return len(DIGITS.findall(response))",
    ],
    "objects that a call can make": [
        "from collections import Counter, OrderedDict, defaultdict, deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "from functools import partial\nfrom pathlib import Path\n"
        "C, O, D, Q = Counter('aab'), OrderedDict(a=1), defaultdict(list, a=[1]), deque([1, 2], maxlen=2)\n"
        "R, N, F, P, B = range(1, 9, 2), Decimal('0.1'), Fraction(1, 3), Path('/a/b'), partial(int, base=16)",
        "def score(response): return C['a'] + O['a'] + len(D['x']) + Q.maxlen + R[2] + float(N + 1) + float(F) + len(P.parts) + B('ff')",
    ],
    "a function in a table": [
        "def half(x): return x / 2\nTABLE = {'half': half, 'int': int, 'len': len}",
        "def score(response): return TABLE['half'](TABLE['len'](response))",
    ],
    "a table with the function itself": [
        "def score(response): return 1 + TABLE['again'](response[1:]) if response else 0\nTABLE = {'again': score}",
    ],
    "imports with aliases": [
        "import math as m, os.path, collections as c\nfrom math import sqrt as root\nfrom os import path as p",
        "def score(response): return m.floor(root(len(os.path.basename(response)))) + c.Counter(response)['a'] + len(p.dirname(response))",
    ],
    "a submodule of a package": [
        "import xml.etree.ElementTree, numpy as np",
        "def score(response): return float(len(xml.etree.ElementTree.fromstring('<a><b/></a>')) + np.linalg.norm([3, 4]))",
    ],
    "from x import *": ["from math import *", "def score(response): return pi * floor(sqrt(len(response)))"],
    "builtins under another name": ["count = len\nkind = int", "def score(response): return count(response) + isinstance(1, kind)"],
    "a method of a hidden object": ["from random import seed, randint", "def score(response):\n    seed(1)\n    return randint(1, 9)"],
    "helpers of helpers": [
        "K = 2",
        "def first(x): return second(x) + K",
        "def second(x): return third(x) * K",
        "def third(x): return len(x)",
        "def score(response): return first(response)",
    ],
    "two functions that call each other": [
        "def even(n): return True if n == 0 else odd(n - 1)\ndef odd(n): return False if n == 0 else even(n - 1)",
        "def score(response): return float(even(len(response)))",
    ],
    "recursion": ["def score(response): return 0.0 if not response else 1.0 + score(response[1:])"],
    "a helper that was redefined in a later cell": [
        "def helper(x): return 1",
        "def score(response): return helper(response) + len(response)",
        "def helper(x): return 2",
    ],
    "the function redefined in a later cell": ["def score(response): return 1", "def score(response): return 2 + len(response)"],
    "an old version under another name": [
        "def grade(response): return len(response)\nold = grade",
        "def grade(response): return 10 * old(response)",
        "def score(response): return grade(response) + old(response)",
    ],
    "an alias and its function": ["def a(x): return len(x)\nb = a", "def score(response): return a(response) + b(response)"],
    "a name that depends on a condition": [
        "try:\n    import no_such_package as fast\nexcept ImportError:\n    fast = None\nif fast is None:\n"
        "    def measure(x): return len(x)\nelse:\n    measure = fast.measure",
        "def score(response): return measure(response) if fast is None else 0",
    ],
    "a constant that was changed later": ["LIMIT = 1", "def score(response): return LIMIT", "LIMIT = 5"],
    "a list that grew": ["WORDS = []\ndef score(response): return len(WORDS)", "WORDS.append('a')"],
    "a memo": ["SEEN = {}\ndef score(response):\n    SEEN.setdefault(response, len(SEEN) * 0 + len(response))\n    return SEEN[response]"],
    "a value made at the first call": ["TABLE = None\ndef score(response):\n    global TABLE\n    TABLE = TABLE or {'a': 1}\n    return TABLE['a']"],
    "a global that it assigns itself": ["def score(response):\n    global made\n    made = len(response)\n    return made"],
    "the same name in another scope": [
        "limit = 3\nwords = ['a']",
        "def score(response):\n    def inner(limit): return limit + 1\n    return inner(1) + limit + sum(1 for words in response) + len(words)",
    ],
    "defaults": ["K = 2\ndef score(response, *, weight=2.0, table=(1, 2), more=K): return weight * len(response) + table[1] + more", "K = 9"],
    "a default of which the variable is gone": ["K = 4\ndef score(response, *, weight=K * 2, text='ä'): return weight * len(text)", "del K"],
    "a lambda": ["score = lambda response: float(len(response))"],
    "a lambda over lines": ["K = 2\nscore = (lambda response:\n   len(response)\n   + K)\n"],
    "two lambdas on a line": ["pair = (lambda r: 1, lambda r: len(r) + 2)\nscore = pair[1]"],
    "a helper that is a lambda": ["clean = lambda s: s.strip().lower()", "def score(response): return len(clean(response))"],
    "a closure over constants": [
        "def make(weight, words):\n    table = {'a': (1, weight)}\n    def score(response, *, more=weight):\n"
        "        return weight * len(response) + table['a'][1] + len(words) + more\n    return score",
        "score = make(2.0, ['a', 'b'])",
    ],
    "a closure of a closure": [
        "def outer(a):\n    def middle(b):\n        def inner(response): return a * b + len(response)\n        return inner\n    return middle",
        "score = outer(2)(3)",
    ],
    "a closure that calls itself": [
        "def make(k):\n    def score(response): return 0 if not response else k + score(response[1:])\n    return score",
        "score = make(2)",
    ],
    "a closure over a function": [
        "def make(f):\n    def score(response): return f(response) + 1\n    return score\ndef size(x): return len(x)",
        "score = make(size)",
    ],
    "a closure with nonlocal": [
        "def make():\n    count = 0\n    def score(response):\n        nonlocal count\n        count = len(response)\n        return count\n    return score",
        "score = make()",
    ],
    "a lambda that is a closure": ["def make(k): return lambda response: k + len(response)", "score = make(4)"],
    "a decorator with wraps": [
        "import functools\ndef doubled(f):\n    @functools.wraps(f)\n    def inner(*a): return 2 * f(*a)\n    return inner",
        "K = 1\n@doubled\n@doubled\ndef score(response): return len(response) + K",
    ],
    "a decorator with arguments": [
        "import functools\ndef times(n):\n    def outer(f):\n        @functools.wraps(f)\n        def inner(*a): return n * f(*a)\n        return inner\n    return outer",
        "N = 3\n@times(N)\ndef score(response): return len(response)",
    ],
    "a cache": ["import functools\n@functools.lru_cache(maxsize=None)\ndef helper(x): return len(x)", "def score(response): return helper(response)"],
    "a cached reward": ["from functools import cache\n@cache\ndef score(response): return len(response)"],
    "a class": [
        "class Scale:\n    factor = 3\n    names = ('a',)\n    def __init__(self, k=1): self.k = k\n    def __call__(self, x): return x * self.factor * self.k",
        "def score(response): return Scale(2)(len(response))",
    ],
    "a class with a base, a property and super()": [
        "class Base:\n    def size(self): return len(self.text)\nclass Text(Base):\n    def __init__(self, text): self.text = text\n"
        "    def size(self): return super().size() + 1\n    @property\n    def half(self): return self.size() / 2\n"
        "    @staticmethod\n    def one(): return 1\n    @classmethod\n    def two(cls): return 2",
        "def score(response): return Text(response).half + Text.one() + Text.two()",
    ],
    "a class attribute that was changed": [
        "class Settings:\n    limit = 1\n    def get(self): return self.limit",
        "Settings.limit = 7",
        "def score(response): return Settings().get()",
    ],
    "a dataclass and an enum with methods": [
        "from dataclasses import dataclass, field\nfrom enum import Enum\nfrom typing import Any",
        "@dataclass\nclass Point:\n    x: int\n    y: Any = 2\n    z: list[Any] = field(default_factory=list)\n    def sum(self): return self.x + self.y",
        "class Color(Enum):\n    RED = 1\n    BLUE = 2\n    def twice(self): return 2 * self.value\nBEST = Color.BLUE",
        "def score(response): return Point(len(response)).sum() + BEST.twice()",
    ],
    "an exception of one's own": [
        "class Wrong(ValueError):\n    def why(self): return 'x'",
        "def score(response):\n    try:\n        raise Wrong\n    except Wrong as e:\n        return len(e.why())",
    ],
    "a static method": ["class Box:\n    @staticmethod\n    def score(response): return len(response) + 1\nscore = Box.score"],
    "attributes of the function": [
        "def load(spec): return None\ndef score(response): return score.weight * len(response)\nscore.weight = 3\nscore.start = load",
    ],
    "a reward of a group": [
        "from gcore import batch_reward",
        "@batch_reward\ndef group(responses): return [len(one) for one in responses]\ndef score(response): return group([response])[0] + group.batch",
    ],
    "async helpers": [
        "import asyncio\nasync def size(x): return len(x)",
        "def score(response):\n    loop = asyncio.new_event_loop()\n    try:\n        return loop.run_until_complete(size(response))\n    finally:\n        loop.close()",
    ],
    "f-strings with globals": ["NAME, W = 'a\\n', 5", "def score(response): return len(f'{NAME!r:>{W}}{response}{len(NAME) + 1}')"],
    "annotations that cannot be copied": [
        "import threading\nLive = threading.Lock()",
        "def score(response: Live, fields: 'Missing' = None) -> Live:\n    value: Live = len(response)\n    return value",
    ],
    "non-ASCII names and text": ["größe = 2\nTEXT = 'ß€𝄞'\ndef zähle(é): return len(é)", "def score(response): return größe * zähle(response + TEXT + '日本')"],
    "tabs": ["def make():\n\tdef score(response):\n\t\tif response:\n\t\t\treturn 1\n\t\treturn 2\n\treturn score\nscore = make()"],
    "a text with less indentation": [
        "def make():\n    def score(response):\n        text = '''\none\n    two\n'''\n        return len(text)\n    return score\nscore = make()"
    ],
    "a nested definition with an indented text": [
        "if True:\n    def score(response):\n        text = '''a\n            b'''\n        return len(text)"
    ],
    "comprehensions, walrus, match, try, with, star": [
        "import contextlib\nLIMIT = 1",
        "def score(response):\n    first, *rest = response or 'x'\n    with contextlib.suppress(ValueError):\n        int('x')\n"
        "    match rest:\n        case []: k = LIMIT\n        case [_, *more]: k = len(more)\n"
        "    return (n := sum(ord(c) > LIMIT for c in response)) + k + n",
    ],
    "a generator inside": ["def score(response):\n    def parts():\n        yield from (len(w) for w in response.split())\n    return sum(parts())"],
    "a docstring with quotes": ['def score(response):\n    """It\'s "quoted" \\\\ \'\'\' ä"""\n    return len(score.__doc__)'],
    "an import inside": ["def score(response):\n    import json as j, math\n    from os.path import basename\n    return math.floor(len(j.dumps(basename(response))))"],
    "an optional import inside": ["def score(response):\n    try:\n        import no_such_package\n    except ImportError:\n        return 1\n    return 2"],
    "the file's own path": ["__file__ = '/a/train.py'\nfrom pathlib import Path", "def score(response): return len(Path(__file__).name)"],
    "arguments of every kind": ["def score(response, /, *rest, key=1, **more): return len(response) + key + len(rest) + len(more)"],
    "an assertion": ["def score(response):\n    assert isinstance(response, str), 'text'\n    return 1"],
    "a long constant": ["WORDS = [str(i) for i in range(5000)]", "def score(response): return len(WORDS) + (response in WORDS)"],
    "a cell with await": ["def score(response): return len(response) + 1\nif False:\n    await nothing"],
}  # fmt: skip

REFUSED = {
    "a live object": (["LIVE = object()", "def score(r): return LIVE is None"], "'score' uses 'LIVE', an object that cannot be copied"),
    "an open file": (["F = open('/dev/null')", "def score(r): return F.read()"], "'score' uses 'F', a TextIOWrapper"),
    "a lock": (["import threading\nL = threading.Lock()", "def score(r): return L.locked()"], "'score' uses 'L', a lock"),
    "a model": (["import types\nmodel = types.SimpleNamespace()", "def score(r): return model"], "'score' uses 'model', a SimpleNamespace"),
    "an array": (["import numpy\nA = numpy.ones(2)", "def score(r): return A[0]"], "'score' uses 'A', a ndarray|an ndarray"),
    "an instance": (["class A:\n    def f(self): return 1\na = A()", "def score(r): return a.f()"], "'score' uses 'a', an A"),
    "a live object of a helper": (["L = object()\ndef h(): return L", "def score(r): return h()"], "'h' uses 'L'"),
    "a live object in a list": (["L = [1, object()]", "def score(r): return L[0]"], "'score' uses 'L'"),
    "a list in itself": (["L = []\nL.append(L)", "def score(r): return len(L)"], "'score' uses 'L', a list that contains itself"),
    "a closure over a live object": (
        ["def make(x):\n    def score(r): return x\n    return score\nscore = make(object())"], "'score' uses 'x' of its enclosing function, an object"),
    "a closure without a value": (
        ["def make():\n    def score(r): return x\n    if False: x = 1\n    return score\nscore = make()"], "has no value yet"),
    "a default that lives": (["def score(r, *, f=open('/dev/null')): return 1"], "a default of 'score' is a TextIOWrapper that cannot be copied"),
    "an attribute that lives": (["def score(r): return 1\nscore.lock = object()"], "'score' has the attribute 'lock', an object that cannot be copied"),
    "an unknown name": (["def score(r): return no_such_name(r)"], "'no_such_name', which is not defined"),
    "globals()": (["X = 1\ndef score(r): return globals()['X']"], r"calls globals\(\)"),
    "a built-in": (["score = len"], "'len' is not a function with Python source: it is built in"),
    "a class": (["class score:\n    def f(self): return 1"], "'score' is a class"),
    "a method": (["class A:\n    def score(self, r): return 1\nscore = A().score"], "'score' is a method of an object of type A"),
    "a callable object": (["class A:\n    def __call__(self, r): return 1\nscore = A()"], "an object of type A is not a function"),
    "a partial": (["import functools\ndef f(a, r): return 1\nscore = functools.partial(f, 1)"], "an object of type partial is not a function"),
    "a decorator without wraps": (
        ["def timed(f):\n    def inner(r): return f(r)\n    return inner\nF = open('/dev/null')\n@timed\ndef score(r): return F.name"], "'score' uses 'F'"),
    "wrapped by a call": (
        ["import functools\ndef twice(f):\n    @functools.wraps(f)\n    def inner(r): return 2 * f(r)\n    return inner",
         "def plain(r): return 1\nscore = twice(plain)"], "wrapped by a call"),
    "no source": (["exec('def score(r): return 1')"], "the source of 'score' is not known"),
    "a helper without source": (["exec('def h(r): return 1')\ndef score(r): return h(r)"], "the source of 'h' is not known"),
    "a class without source": (["K = type('K', (), {})\ndef score(r): return K"], "the source of 'K' is not known"),
    "a magic": (
        ["class Shell:\n    def run(self): return 1\nget_ipython = Shell().run", "def score(r):\n    get_ipython()\n    return 1"],
        "uses notebook magics"),
    "too large": (["T = 'x' * 2_000_000", "def score(r): return len(T)"], f"'T' the most; the limit is {MOST_FILE_BYTES}"),
    "a relative import": (["def score(r):\n    from . import x\n    return x"], "has a relative import"),
    "super() outside of its class": (
        ["class A:\n    def score(self, r=None): return super().__hash__()\nscore = A.score"], r"calls super\(\)"),
}  # fmt: skip


class Cells:
    """A namespace in which cells are run as a notebook runs them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "notebook_of_a_test"}

    def run(self, text: str, file: str) -> None:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        code = compile(text, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        waiting = eval(code, self.names)
        if inspect.iscoroutine(waiting):
            with contextlib.suppress(StopIteration):
                waiting.send(None)


def made(case: str, cells: list[str]) -> Callable[..., Any]:
    """What `score` means after the cells."""
    notebook = Cells()
    for number, text in enumerate(cells):
        notebook.run(text, f"<cell {case} {number}>")
    score: Callable[..., Any] = notebook.names["score"]
    return score


PROGRAM = """
import json, pathlib, sys
from gcore.plugins import PluginFile, load_plugin_file
for line in sys.stdin:
    case, path, name, responses = json.loads(line)
    try:
        function = load_plugin_file(PluginFile(pathlib.Path(path), name), "reward.name")
        print(json.dumps([case, [function(one) for one in responses]]))
    except Exception as error:
        print(json.dumps([case, f"{type(error).__name__}: {error}"]))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the copies of all cases give in a new process in another folder."""
    folder = tmp_path_factory.mktemp("copied")
    lines = []
    for number, (case, cells) in enumerate(COPIED.items()):
        function = made(case, cells)
        try:
            text = function_source(function)
        except UsageError:
            continue  # the test of the case says so
        file = folder / f"m{number}.py"
        file.write_text(text, encoding="utf-8")
        file.chmod(0o600)
        lines.append(json.dumps([case, str(file), function_name(function), RESPONSES]))
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, input="\n".join(lines), cwd=folder, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("case", COPIED)
def test_the_copy_gives_in_a_new_process_what_the_function_gives(case: str, elsewhere: dict[str, Any]) -> None:
    function = made(case, COPIED[case])
    text = function_source(function)
    assert elsewhere[case] == [function(one) for one in RESPONSES], text


@pytest.mark.parametrize("case", REFUSED)
def test_uncopyable_functions_are_refused_in_a_sentence(case: str) -> None:
    cells, said = REFUSED[case]
    with pytest.raises(UsageError, match=said) as raised:
        function_source(made(case, cells))
    assert "\n" not in str(raised.value)


def test_only_what_is_needed_is_copied() -> None:
    text = function_source(made("needed", ["import math\nLIMIT = 3\ndef score(r): return 1"]))
    assert "LIMIT" not in text
    assert "import math" not in text


def test_a_cached_function_keeps_its_cache() -> None:
    text = function_source(made("cached", COPIED["a cached reward"]))
    assert "@cache" in text


def test_hooks_of_a_reward_are_copied() -> None:
    names: dict[str, Any] = {}
    exec(compile(function_source(made("hooks", COPIED["attributes of the function"])), "copy.py", "exec"), names)
    assert callable(names["score"].start)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's, on the path of this process only."""
    (tmp_path / "own_helpers.py").write_text(
        "import math\nSCALE = 3\ndef inner(x):\n    return math.floor(len(x) * SCALE)\ndef helper(x):\n    return inner(x) + 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_helpers", None)


def test_functions_of_a_module_that_is_not_installed_are_copied_with_their_own_constants(project: Path) -> None:
    score = made("project", ["from own_helpers import *", "def score(response): return helper(response)"])
    names: dict[str, Any] = {}
    text = function_source(score)
    exec(compile(text, "copy.py", "exec"), names)
    assert "own_helpers" not in text
    assert names["score"]("abc") == score("abc") == 10


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        pytest.param(["import own_helpers\ndef score(r): return own_helpers.helper(r)"], "uses the module 'own_helpers'", id="module"),
        pytest.param(["def score(r):\n    import own_helpers\n    return 1"], "imports 'own_helpers'", id="import inside"),
        pytest.param(
            ["from own_helpers import helper\nSCALE = 5\ndef score(r): return helper(r) + SCALE"], "'SCALE' has two meanings", id="names"
        ),
    ],
)  # fmt: skip
def test_a_module_that_is_not_installed_is_refused_where_it_cannot_be_copied(
    project: Path, cells: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        function_source(made("project module", cells))


def test_a_file_that_was_edited_after_its_import_is_refused(project: Path) -> None:
    import own_helpers  # type: ignore[import-not-found]

    (project / "own_helpers.py").write_text("# another first line\ndef helper(x):\n    return 7\n")
    with pytest.raises(UsageError, match="the source of 'helper' has changed since it was loaded"):
        function_source(own_helpers.helper)
