"""One source file as the house rules look at it."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
parse = functools.cache(ast.parse)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@dataclass(frozen=True)
class Module:
    """One source file, with the files around it by path."""

    path: str
    sources: Mapping[str, str]

    @property
    def source(self) -> str:
        return self.sources[self.path]

    @property
    def tree(self) -> ast.Module:
        return parse(self.source)

    @property
    def name(self) -> str:
        return module_name(self.path)

    @property
    def is_init(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def in_package(self) -> bool:
        return within(self.name, "cmoe")

    @property
    def is_kernel(self) -> bool:
        return within(self.name, "cmoe.custom_ops.triton")


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, nested ones too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, Function):
                    yield name, child
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    return walk(module.tree, "")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts with a name, otherwise the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call of something that has a name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """The last names of the decorators: `dataclass` for `@dataclasses.dataclass(frozen=True)`."""
    plain = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {dotted(d).rpartition(".")[2] for d in plain}


def comments(module: Module) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def imported(module: Module, node: ast.AST) -> set[str]:
    """The modules of cmoe that a statement imports, with a submodule told from an exported name."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        parts = module.name.split(".") if node.level else []
        base = parts[: len(parts) - node.level + module.is_init]
        origin = ".".join(base + ([node.module] if node.module else []))
        known = {module_name(path) for path in module.sources}
        full = (f"{origin}.{alias.name}" for alias in node.names)
        names = {name if name in known else origin for name in full}
    else:
        names = set()
    return {name for name in names if within(name, "cmoe")}


def imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        for name in sorted(imported(module, node)):
            yield node.lineno, name
