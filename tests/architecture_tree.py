"""The rules about the tree as a whole: what is exported, documented, listed and tested."""

from __future__ import annotations

import ast
import re

from architecture_rules import PACKAGE, Module, is_name


def exported_names(init: Module) -> list[str]:
    """The value of ``__all__``."""
    for node in init.tree.body:
        if isinstance(node, ast.Assign) and any(is_name(t, "__all__") for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def documented_names(reference: str) -> list[str]:
    """The names a reference page explains: the first cell of each row of its tables."""
    return re.findall(r"^\| `(\w+)` \|", reference, flags=re.MULTILINE)


def listed_files(readme: str) -> list[str]:
    """The package's Python files that the tree in a README lists, one a line."""
    folders: list[str] = []
    files = []
    for line in readme.splitlines():
        if line.startswith("```"):
            folders = []
        if not (found := re.match(r"( *)([\w./-]+)", line)):
            continue
        depth, name = len(found.group(1)) // 2, found.group(2)
        folders = folders[:depth]
        path = "/".join([*folders, name.rstrip("/")])
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
        elif name.endswith(".py") and path.startswith(f"{PACKAGE}/"):
            files.append(path)
    return files


def missing_tests(sources: list[Module], tests: set[str], elsewhere: dict[str, str]) -> list[str]:
    """Sources ``a/b.py`` without ``test_[gpu_]a_b*.py``, ``test_[gpu_]b*.py`` or one elsewhere."""
    complaints = []
    for module in sources:
        parts = module.path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] in ("__init__", "__main__"):
            continue
        names = {"_".join(parts), "_".join(p for p in parts if p != "reference"), parts[-1]}
        wanted = re.compile(rf"test_(gpu_)?({'|'.join(sorted(names))})(_\w+)?")
        if elsewhere.get("/".join(parts)) in tests or any(map(wanted.fullmatch, tests)):
            continue
        complaints.append(f"{module.path}:1: has no test file")
    return complaints
