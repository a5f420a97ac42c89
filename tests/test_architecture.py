"""The tree keeps the rules of this house, and each rule notices when it is broken."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

import architecture_rules as rules
import architecture_tree as tree
from architecture_rules import PACKAGE, ROOT, Module

Rule = Callable[[Module], list[str]]

EVERYWHERE: list[Rule] = [
    rules.files_are_short,
    rules.functions_are_short,
    rules.names_say_what_they_mean,
    rules.files_teach_their_idea,
]
IN_THE_PACKAGE: list[Rule] = [
    rules.imports_point_left,
    rules.parameters_are_few,
    rules.booleans_are_rare,
    rules.ctx_carries_only_a_plan,
    rules.nothing_is_stuck_on_a_tensor,
    rules.only_device_reads_the_environment,
    rules.users_get_errors_not_asserts,
    rules.nothing_is_left_for_later,
    rules.public_names_are_documented,
]
# Sources whose test file has another name.
TESTED_ELSEWHERE: dict[str, str] = {}

SOURCES = rules.modules("src")
ALL = SOURCES + rules.modules("tests", "examples")


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    complaints = [complaint for module in ALL for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", IN_THE_PACKAGE, ids=lambda rule: rule.__name__)
def test_every_source_file_keeps_the_rule(rule: Rule) -> None:
    complaints = [complaint for module in SOURCES for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


def test_every_source_file_has_its_test_file() -> None:
    tests = {module.path.stem for module in rules.modules("tests")}
    complaints = tree.missing_tests(SOURCES, tests, TESTED_ELSEWHERE)
    assert not complaints, "\n".join(complaints)


def test_the_readme_lists_every_source_file() -> None:
    listed = tree.listed_files((ROOT / "README.md").read_text())
    sources = [str(module.path) for module in SOURCES if module.path.name != "__init__.py"]
    assert sorted(path for path in listed if not path.endswith("/__init__.py")) == sorted(sources)


def test_the_public_names_are_those_the_reference_explains() -> None:
    init = next(module for module in SOURCES if not module.layer)
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(tree.documented_names(reference)) == sorted(tree.exported_names(init))


def test_the_package_file_only_names_what_is_public() -> None:
    init = next(module for module in SOURCES if not module.layer)
    header, *body = init.tree.body
    assert isinstance(header, ast.Expr)
    imported = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = tree.exported_names(init)
    assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in body)
    assert sorted(imported) == sorted(exported)


# --- each rule notices -------------------------------------------------------------------------

BAD: list[tuple[Rule, str, str]] = [
    (rules.files_are_short, "saving", "x = 1\n" * 401),
    (rules.functions_are_short, "saving", "def f():\n" + "    x = 1\n" * 60),
    (rules.functions_are_short, "saving", "class A:\n  def f(self):\n" + "    x = 1\n" * 60),
    (rules.functions_are_short, "kernels/cast", "def f():\n" + "    x = 1\n" * 120),
    (rules.names_say_what_they_mean, "nn/tensor_utils", ""),
    (rules.names_say_what_they_mean, "manager/linear", ""),
    (rules.names_say_what_they_mean, "linear_v2", ""),
    (rules.names_say_what_they_mean, "saving", "def maybe_save(): ..."),
    (rules.names_say_what_they_mean, "saving", "maybe_x = 1"),
    (rules.names_say_what_they_mean, "saving", "def f(maybe_x): ..."),
    (rules.names_say_what_they_mean, "saving", "class StateManager: ..."),
    (rules.files_teach_their_idea, "saving", "x = 1"),
    (rules.imports_point_left, "saving", "from backstash.nn import Linear"),
    (rules.imports_point_left, "saving", "from .nn.linear import Linear"),
    (rules.imports_point_left, "nn/linear", "from ..moe import layer"),
    (rules.imports_point_left, "nn/linear", "from .. import moe"),
    (rules.imports_point_left, "nn/linear", "import backstash.train.loop"),
    (rules.imports_point_left, "nn/linear", "def f():\n    from backstash.cli import main"),
    (rules.imports_point_left, "moe/layer", "from backstash import checkpoint"),
    (rules.imports_point_left, "offload", "from .stash.pool import Pool"),
    (rules.imports_point_left, "cli", "import backstash"),
    (rules.imports_point_left, "cli", "from backstash import Linear"),
    (rules.imports_point_left, "somewhere", ""),
    (rules.parameters_are_few, "saving", "def f(a, b, c, d, e, *f, g): ..."),
    (rules.parameters_are_few, "saving", "class _A:\n    def __init__(self, a,b,c,d,e,f,g): ..."),
    (rules.booleans_are_rare, "saving", "def f(*, a: bool, b=False): ..."),
    (rules.booleans_are_rare, "saving", "def f(a=True): ..."),
    (rules.booleans_are_rare, "saving", "def f(a: bool): ..."),
    (rules.ctx_carries_only_a_plan, "nn/linear", "def forward(ctx, x):\n    ctx.shape = x.shape"),
    (rules.ctx_carries_only_a_plan, "nn/linear", "def f(ctx):\n    return ctx.saved_tensors"),
    (rules.ctx_carries_only_a_plan, "nn/linear", "def f(ctx):\n    setattr(ctx, 'x', 1)"),
    (rules.nothing_is_stuck_on_a_tensor, "nn/linear", "def f(weight):\n    weight.tag = 1"),
    (rules.nothing_is_stuck_on_a_tensor, "nn/linear", "def f(a: Tensor):\n    a.tag, b = 1, 2"),
    (rules.only_device_reads_the_environment, "cli", "import os\nx = os.environ['X']"),
    (rules.only_device_reads_the_environment, "cli", "import os\nx = os.getenv('X')"),
    (rules.only_device_reads_the_environment, "cli", "from os import environ"),
    (rules.users_get_errors_not_asserts, "saving", "def f(x):\n    assert x"),
    (
        rules.users_get_errors_not_asserts,
        "saving",
        "class A:\n    def f(self):\n        assert self",
    ),
    (rules.users_get_errors_not_asserts, "nn/linear", "class A:\n  def __init__(s):\n    assert s"),
    (rules.nothing_is_left_for_later, "saving", "x = 1  # TODO"),
    (rules.nothing_is_left_for_later, "saving", "def f():\n    raise NotImplementedError('no')"),
    (rules.public_names_are_documented, "saving", "def f(): ..."),
    (rules.public_names_are_documented, "saving", "class A: ..."),
    (
        rules.public_names_are_documented,
        "saving",
        "class A:\n    'A.'\n    def f(self):\n" + "        x = 1\n" * 6,
    ),
]


def snippet(name: str, text: str) -> Module:
    return Module(PACKAGE / f"{name}.py", text)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    BAD,
    ids=[f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(BAD)],
)
def test_a_rule_notices_bad_code(rule: Rule, name: str, text: str) -> None:
    (complaint, *_) = rule(snippet(name, text))
    assert complaint.startswith(f"src/backstash/{name}.py:")


GOOD: list[tuple[Rule, str, str]] = [
    (rules.imports_point_left, "nn/linear", "from ..saving import saved_values"),
    (rules.imports_point_left, "nn/linear", "from backstash import kernels\nfrom . import module"),
    (rules.imports_point_left, "cli", "from backstash.bench import main\nimport torch"),
    (rules.functions_are_short, "kernels/cast", "def f():\n" + "    x = 1\n" * 119),
    (rules.names_say_what_they_mean, "nn/linear", "from contextlib import AbstractContextManager"),
    (rules.functions_are_short, "saving", "def f():\n" + "    x = 1\n" * 59),
    (rules.parameters_are_few, "saving", "class A:\n    def f(self, a, b, c, d, e, g): ..."),
    (rules.parameters_are_few, "nn/linear", "class A:\n    def __init__(s,a,b,c,d,e,f,g): ..."),
    (rules.parameters_are_few, "kernels/norm", "def f(a, b, c, d, e, f, g, h): ..."),
    (rules.booleans_are_rare, "nn/linear", "def f(*, sparse: bool = False): ..."),
    (rules.booleans_are_rare, "nn/linear", "class A:\n    def __init__(s, a=True, b=False): ..."),
    (rules.ctx_carries_only_a_plan, "nn/linear", "def f(ctx):\n    ctx.plan = 1"),
    (rules.ctx_carries_only_a_plan, "saving", "def f(ctx):\n    return ctx.saved_tensors"),
    (rules.nothing_is_stuck_on_a_tensor, "nn/linear", "def f(w: Tensor):\n    w.grad = None"),
    (rules.nothing_is_stuck_on_a_tensor, "saving", "def f(frame):\n    frame.active = True"),
    (rules.only_device_reads_the_environment, "device", "import os\nx = os.environ"),
    (rules.users_get_errors_not_asserts, "saving", "def _f(x):\n    assert x"),
]


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    GOOD,
    ids=[f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(GOOD)],
)
def test_a_rule_lets_good_code_pass(rule: Rule, name: str, text: str) -> None:
    assert rule(snippet(name, text)) == []


def test_every_rule_is_seen_failing() -> None:
    assert {rule for rule, _, _ in BAD} == {*EVERYWHERE, *IN_THE_PACKAGE}


def test_a_missing_test_file_is_noticed() -> None:
    sources = [snippet(name, "") for name in ("nn/linear", "kernels/reference/cast", "saving")]
    assert tree.missing_tests(sources, {"test_nn_linear", "test_kernels_cast"}, {}) == [
        "src/backstash/saving.py:1: has no test file"
    ]
    assert tree.missing_tests(sources[2:], {"test_saving_threads"}, {}) == []
    assert tree.missing_tests(sources[2:], {"test_kept"}, {"saving": "test_kept"}) == []
    assert tree.missing_tests(sources[2:], {"test_savings"}, {}) != []


def test_the_readme_tree_is_read_by_its_indentation() -> None:
    text = "```\nsrc/backstash/\n  a.py  one\n  nn/\n    b.py  two\n  c.py\ntests/\n  d.py\n```\n"
    assert tree.listed_files(text) == [
        "src/backstash/a.py",
        "src/backstash/nn/b.py",
        "src/backstash/c.py",
    ]


def test_documented_names_are_the_first_cells_of_the_reference_tables() -> None:
    assert tree.documented_names("| `Linear` | a layer |\n| name | x |\n`Other`\n") == ["Linear"]


def test_exported_names_are_read_without_importing() -> None:
    init = Module(PurePosixPath("src/backstash/__init__.py"), "__all__ = ['a', 'b']")
    assert tree.exported_names(init) == ["a", "b"]
