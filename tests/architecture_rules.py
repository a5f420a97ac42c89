"""The rules of this house as functions: a module goes in, complaints come out.

Nothing is imported, only parsed, so that a module that fails to import is judged too.
``test_architecture.py`` applies each rule to the tree, and to a bad snippet that it has to
notice.  A complaint reads ``path:line: what is wrong``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = PurePosixPath("src/backstash")

# A file imports only from layers left of its own; those of one set do not know one another.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split(" | "))
    for names in (
        "errors",
        "device",
        "opaque",
        "kernels",
        "formats",
        "tensors",
        "recompute",
        "recipes",
        "saving",
        "weights",
        "nn",
        "stash | offload | checkpoint | moe",
        "train | hf",
        "report",
        "bench",
        "cli | __main__",
    )
)

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS = 400, 60, 120, 6
FORBIDDEN_WORDS = frozenset(
    {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
)
# Signatures that other software fixed: a flag stays where its users expect it.
FIXED_SIGNATURES = frozenset({"autocast", "requires_grad_"})
# Attributes of a tensor or parameter that are torch's own, or part of a foreign protocol.
TENSOR_ATTRIBUTES = frozenset({"grad", "data", "requires_grad", "grad_added_to_main_grad"})
# What a base class or protocol documents for all that implement it.
PROTOCOL_METHODS = frozenset(
    {"forward", "backward", "extra_repr", "pack", "unpack", "encode", "decode", "buffers"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file: where it is, its text, and its syntax tree."""

    path: PurePosixPath
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def in_package(self) -> bool:
        return self.path.is_relative_to(PACKAGE)

    @property
    def in_kernels(self) -> bool:
        return self.path.is_relative_to(PACKAGE / "kernels")

    @property
    def layer(self) -> str:
        """The name of the file or folder directly under the package; "" for its __init__."""
        return "" if self.path == PACKAGE / "__init__.py" else _first_part(self.path)

    def complain(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def modules(*folders: str) -> list[Module]:
    """All Python files under the folders, with paths relative to the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [Module(PurePosixPath(file.relative_to(ROOT)), file.read_text()) for file in files]


def _first_part(path: PurePosixPath) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[Function, str]]:
    """Every function of a tree with the name of the class it is in, outermost first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node, owner
        yield from _functions(node, node.name if isinstance(node, ast.ClassDef) else owner)


def _is_public(*names: str) -> bool:
    return not any(name.startswith("_") and not name.startswith("__") for name in names)


# --- imports -----------------------------------------------------------------------------------


def imports_point_left(module: Module) -> list[str]:
    """A file imports only from layers to the left of its own, and from its own."""
    if not module.layer:
        return []
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    if module.layer not in rank:
        return [module.complain(module.tree, f"{module.layer} is in no layer")]
    complaints = []
    for node, layer in _imported_layers(module):
        if layer == module.layer:
            continue
        if layer not in rank:
            complaints.append(module.complain(node, f"imports {layer!r}, which is in no layer"))
        elif rank[layer] >= rank[module.layer] and module.layer != "__main__":
            complaints.append(module.complain(node, f"{module.layer} must not import {layer}"))
    return complaints


def _imported_layers(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "backstash":
                    yield node, [*alias.name.split("."), ""][1]
        elif isinstance(node, ast.ImportFrom):
            parts = _absolute(module, node)
            if parts[:1] == ["backstash"]:
                for name in parts[1:2] or [alias.name for alias in node.names]:
                    yield node, name


def _absolute(module: Module, node: ast.ImportFrom) -> list[str]:
    named = node.module.split(".") if node.module else []
    if not node.level:
        return named
    package = list(module.path.relative_to("src").parent.parts)
    return package[: len(package) - node.level + 1] + named


# --- sizes and signatures ----------------------------------------------------------------------


def files_are_short(module: Module) -> list[str]:
    lines = module.text.count("\n")
    if lines <= FILE_LINES:
        return []
    return [module.complain(module.tree, f"{lines} lines; a file has at most {FILE_LINES}")]


def functions_are_short(module: Module) -> list[str]:
    limit = KERNEL_LINES if module.in_kernels else FUNCTION_LINES
    return [
        module.complain(function, f"{function.name} has {lines} lines; at most {limit}")
        for function, _ in _functions(module.tree)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > limit
    ]


def parameters_are_few(module: Module) -> list[str]:
    if module.in_kernels:
        return []
    complaints = []
    for function, owner in _functions(module.tree):
        names = [arg.arg for arg in _parameters(function)]
        if owner and names[:1] and names[0] in ("self", "cls", "ctx"):
            names = names[1:]
        if len(names) > PARAMETERS and not _is_public_constructor(function, owner):
            what = f"{function.name} takes {len(names)} parameters; at most {PARAMETERS}"
            complaints.append(module.complain(function, what))
    return complaints


def booleans_are_rare(module: Module) -> list[str]:
    """At most one boolean, keyword-only; two that interact are an enum."""
    complaints = []
    for function, owner in _functions(module.tree):
        if _is_public_constructor(function, owner) or function.name in FIXED_SIGNATURES:
            continue
        flags = [arg for arg in _parameters(function) if _is_boolean(function, arg)]
        if len(flags) > 1:
            names = ", ".join(arg.arg for arg in flags)
            complaints.append(module.complain(function, f"{function.name} has booleans {names}"))
        complaints += [
            module.complain(function, f"{function.name}: boolean {arg.arg} must be keyword-only")
            for arg in flags
            if arg not in function.args.kwonlyargs
        ]
    return complaints


def _parameters(function: Function) -> list[ast.arg]:
    args = function.args
    stars = [arg for arg in (args.vararg, args.kwarg) if arg]
    return args.posonlyargs + args.args + args.kwonlyargs + stars


def _is_public_constructor(function: Function, owner: str) -> bool:
    return function.name in ("__init__", "__new__") and _is_public(owner)


def _is_boolean(function: Function, arg: ast.arg) -> bool:
    annotation = ast.unparse(arg.annotation) if arg.annotation else ""
    positional = function.args.posonlyargs + function.args.args
    defaults = dict(zip(reversed(positional), reversed(function.args.defaults), strict=False))
    defaults |= dict(zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True))
    default = defaults.get(arg)
    by_default = isinstance(default, ast.Constant) and isinstance(default.value, bool)
    return annotation in ("bool", "bool | None") or by_default


# --- what code may touch -----------------------------------------------------------------------


def ctx_carries_only_a_plan(module: Module) -> list[str]:
    """Backward sees what ``save_for_backward`` kept and one frozen plan, nothing else."""
    if module.path == PACKAGE / "saving.py" or module.path.is_relative_to(PACKAGE / "saving"):
        return []
    allowed = {"plan", "needs_input_grad", "set_materialize_grads"}
    complaints = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_name(node.value, "ctx"):
            if node.attr not in allowed and not node.attr.startswith("mark_"):
                complaints.append(module.complain(node, f"ctx.{node.attr} is not allowed"))
        elif isinstance(node, ast.Call) and ast.unparse(node).startswith("setattr(ctx"):
            complaints.append(module.complain(node, "setattr on ctx is not allowed"))
    return complaints


def nothing_is_stuck_on_a_tensor(module: Module) -> list[str]:
    """What is known of a tensor is in its type or passed beside it, never an attribute of it.

    A tensor is what is annotated as one in the file, or has the name of one.
    """
    tensors = {
        node.arg
        for node in ast.walk(module.tree)
        if isinstance(node, ast.arg) and node.annotation
        if re.search(r"\b(Tensor|Parameter)\b", ast.unparse(node.annotation))
    }
    named = re.compile(r"(d?[xy]|weight|bias|param|parameter|tensor|input|output)(_[A-Z]+)?")
    complaints = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if not isinstance(node.value, ast.Name) or node.attr in TENSOR_ATTRIBUTES:
            continue
        if node.value.id in tensors - {"self", "cls"} or named.fullmatch(node.value.id):
            what = f"sets {ast.unparse(node)}; keep it in a type or pass it beside"
            complaints.append(module.complain(node, what))
    return complaints


def only_device_reads_the_environment(module: Module) -> list[str]:
    if module.path == PACKAGE / "device.py":
        return []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    complaints = []
    for node in ast.walk(module.tree):
        used: set[str] = set()
        if isinstance(node, ast.Attribute) and is_name(node.value, "os"):
            used = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {alias.name for alias in node.names}
        if used & names:
            complaints.append(module.complain(node, "reads the environment; ask device.py"))
    return complaints


def users_get_errors_not_asserts(module: Module) -> list[str]:
    """``assert`` is for ourselves: it says nothing to a user, and goes away under ``-O``."""
    return [
        module.complain(node, f"assert in {function.name}; raise a class of errors.py")
        for function, owner in _functions(module.tree)
        if _is_public(function.name, owner)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
    ]


def nothing_is_left_for_later(module: Module) -> list[str]:
    complaints = [
        f"{module.path}:{number}: {found.group()} in the code"
        for number, line in enumerate(module.text.splitlines(), start=1)
        if (found := re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line))
    ]
    if module.path != PACKAGE / "errors.py":
        complaints += [
            module.complain(node, "NotImplementedError; use a class of errors.py")
            for node in ast.walk(module.tree)
            if is_name(node, "NotImplementedError")
        ]
    return complaints


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# --- names and words ---------------------------------------------------------------------------


def names_say_what_they_mean(module: Module) -> list[str]:
    complaints = []
    for part in (*module.path.parts[:-1], module.path.stem):
        if FORBIDDEN_WORDS & set(part.split("_")) or re.search(r"_impl$|_v\d+$", part):
            complaints.append(f"{module.path}:1: {part!r} names no idea")
    for node in ast.walk(module.tree):
        name = ""
        if isinstance(node, Function | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if re.search(r"^_*maybe_|_impl$|_v\d+$|Manager$|Helper$", name):
            complaints.append(module.complain(node, f"the name {name} says too little"))
    return complaints


def files_teach_their_idea(module: Module) -> list[str]:
    header = ast.get_docstring(module.tree)
    return [] if header else [module.complain(module.tree, "the file has no header docstring")]


def public_names_are_documented(module: Module) -> list[str]:
    """Functions and classes always; methods unless they are short or part of a protocol."""
    complaints = []
    for node in module.tree.body:
        if not isinstance(node, Function | ast.ClassDef) or not _is_public(node.name):
            continue
        if not ast.get_docstring(node):
            complaints.append(module.complain(node, f"{node.name} has no docstring"))
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if (
                isinstance(method, Function)
                and not method.name.startswith("_")
                and method.name not in PROTOCOL_METHODS
                and (method.end_lineno or 0) - method.lineno > 5
                and not ast.get_docstring(method)
            ):
                what = f"{node.name}.{method.name} has no docstring"
                complaints.append(module.complain(method, what))
    return complaints
