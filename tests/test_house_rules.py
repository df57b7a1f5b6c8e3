"""The house rules, each beside an example that breaks it.

A rule is a function of one module that yields (line, message) for each break. `RULES` collects
them; the tests run every rule over the package, then over its own bad example. An exception to a
rule is a line of a table below, with its reason; a line that excepts nothing is a failure too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.source import (
    Module,
    calls,
    comments,
    decorators,
    dotted,
    functions,
    imported,
    imports,
    module_name,
    within,
)

REPOSITORY = Path(__file__).parent.parent

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 12
MAX_FIELDS = 12

# A module imports from its own level or from lower ones. A line for a package holds for what is in
# it, except for modules that have their own line.
LEVELS: Mapping[str, int] = {
    "cmoe.errors": 0,
    "cmoe.environment": 0,
    "cmoe.activation": 0,
    "cmoe.families": 0,
    "cmoe.config": 0,
    "cmoe.routing": 0,
    "cmoe.loading": 0,
    "cmoe.custom_ops": 1,
    "cmoe.quant": 2,
    "cmoe.distributed": 2,
    "cmoe.expert_map": 2,
    "cmoe.autocast": 2,
    "cmoe.context": 2,
    "cmoe.layer_state": 2,
    "cmoe.pluggable": 2,
    "cmoe.overlap": 2,
    "cmoe.router": 3,
    "cmoe.gate": 3,
    "cmoe.routed_experts": 3,
    "cmoe.shared_experts": 3,
    "cmoe.runner_interface": 3,
    "cmoe.runner_weights": 4,
    "cmoe.packed_weights": 4,
    "cmoe.checkpoint": 4,
    "cmoe.ops": 4,
    "cmoe.runner": 5,
    "cmoe.layer": 6,
    "cmoe.integrations": 7,
    "cmoe.demo": 7,
    "cmoe.inspection": 7,
    "cmoe.machine": 7,
    "cmoe.cli": 7,
    "cmoe.__main__": 7,
    "cmoe": 7,  # exports only, so it stands as high as what it may export
}

# Kernels know tensors: nothing that describes a layer or a model.
KNOWN_TO_KERNELS = ("cmoe.custom_ops", "cmoe.errors", "cmoe.environment", "cmoe.activation")

BACKENDS = ("cmoe.custom_ops.cpu", "cmoe.custom_ops.triton")
BACKEND_LOADER = "cmoe.custom_ops.backends"

# What a break's line may start with, and why it is right all the same.
EXCEPTIONS: Mapping[str, str] = {
    "cmoe/custom_ops/fused_experts.py: fused_experts_reference has": "the op's own signature",
    "cmoe/custom_ops/fused_experts.py: fused_experts_fake has": "the op's own signature",
    "cmoe/config.py: getattr probes": "from_hf reads the configs of many models",
    "cmoe/pluggable.py: _ReplaceableMeta.__call__ takes **kwargs": "builds any class",
    "cmoe/context.py: _PROCESS_WIDE is": "registry of the layers by name, weak",
    "cmoe/context.py: _BY_TOKEN is": "registry of the layers by token, weak",
    "cmoe/pluggable.py: _NAMED is": "registry of the replaceable classes",
    "cmoe/pluggable.py: _REPLACEMENTS is": "registry of what stands in their place",
    "cmoe/custom_ops/triton/backend.py: imports cmoe.custom_ops.triton.": (
        "triton is optional, its import takes long"
    ),
    "cmoe/custom_ops/triton/backend.py: imports cmoe.custom_ops.triton.route inside": (
        "triton is optional, its import takes long"
    ),
    "cmoe/custom_ops/backends.py: _REGISTERED is": "registry of backends from outside",
    "cmoe/custom_ops/registration.py: _LIBRARIES is": "registrations of ops live as long as they",
}


Break = tuple[int, str]
Rule = Callable[[Module], Iterator[Break]]

RULES: dict[Rule, list[Mapping[str, str]]] = {}


def rule(bad: str | Mapping[str, str], path: str = "cmoe/runner.py") -> Callable[[Rule], Rule]:
    """Collects a rule with an example that breaks it: one source, or several by path."""

    def collect(function: Rule) -> Rule:
        RULES.setdefault(function, []).append({path: bad} if isinstance(bad, str) else bad)
        return function

    return collect


def level(name: str) -> int | None:
    """The level of the module, or of the nearest package around it that has one."""
    while name not in LEVELS and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return LEVELS.get(name)


# --- size -----------------------------------------------------------------------------------------


@rule("x = 1\n" * (MAX_FILE_LINES + 1))
def files_are_short(module: Module) -> Iterator[Break]:
    num_lines = len(module.source.splitlines())
    if module.in_package and not module.is_kernel and num_lines > MAX_FILE_LINES:
        yield 1, f"has {num_lines} lines, at most {MAX_FILE_LINES}: find its second idea"


@rule("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
def functions_are_short(module: Module) -> Iterator[Break]:
    if not module.in_package or module.is_kernel:
        return
    for name, node in functions(module):
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


@rule("def f(a, b, c, d, e, f, g, /, h, i, *, j, k, l, m): ...")
def parameters_are_few(module: Module) -> Iterator[Break]:
    if not module.in_package or module.is_kernel:
        return
    for name, node in functions(module):
        every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        number = len([a for a in every if a.arg not in ("self", "cls", "ctx")])
        if number > MAX_PARAMETERS:
            yield node.lineno, f"{name} has {number} parameters, at most {MAX_PARAMETERS}"


@rule("@dataclass(frozen=True)\nclass C:\n" + "    x: int\n" * (MAX_FIELDS + 1))
def dataclasses_are_small(module: Module) -> Iterator[Break]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and "dataclass" in decorators(node) and module.in_package:
            fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
            number = len([f for f in fields if "ClassVar" not in ast.unparse(f.annotation)])
            if number > MAX_FIELDS:
                yield node.lineno, f"{node.name} has {number} fields, at most {MAX_FIELDS}"


# --- imports --------------------------------------------------------------------------------------


@rule("from cmoe.layer import FusedMoE", path="cmoe/router.py")
@rule("from ..runner import MoERunner", path="cmoe/quant/int8.py")
@rule("x = 1", path="cmoe/stranger.py")
def imports_point_down(module: Module) -> Iterator[Break]:
    if not module.in_package:
        return
    own = level(module.name)
    if own is None:
        yield 1, f"{module.name} has no level: give it a line in LEVELS"
        return
    for line, name in imports(module):
        other = level(name)
        if other is not None and other > own:
            yield line, f"level {own} imports {name} of level {other}"


@rule(
    {
        "cmoe/quant/a.py": "from cmoe.quant import b",
        "cmoe/quant/b.py": "from cmoe.quant.c import x",
        "cmoe/quant/c.py": "import cmoe.quant.a",
    }
)
@rule(
    {
        "cmoe/router/__init__.py": "from cmoe.router.topk import TopK",
        "cmoe/router/topk.py": "from cmoe.gate import Gate",
        "cmoe/router/base.py": "",
        "cmoe/gate.py": "from cmoe.router.base import Router",
    }
)
def imports_have_no_cycle(module: Module) -> Iterator[Break]:
    """Importing `cmoe.a.b` from outside of `cmoe.a` runs `cmoe/a/__init__.py` too."""
    paths = {module_name(path): path for path in module.sources}
    reached: set[str] = set()

    def follow(current: Module) -> None:
        for _, name in imports(current):
            packages = (name[: dot.start()] for dot in re.finditer(r"(?<!^cmoe)\.", name))
            for run in (name, *(p for p in packages if not within(current.name, p))):
                if run in paths and run not in reached:
                    reached.add(run)
                    follow(Module(paths[run], module.sources))

    follow(module)
    if module.in_package and module.name in reached:
        yield 1, f"{module.name} imports itself by way of others"


@rule("from cmoe.config import MoEConfig", path="cmoe/custom_ops/route.py")
def kernels_know_only_tensors(module: Module) -> Iterator[Break]:
    for line, name in imports(module) if within(module.name, "cmoe.custom_ops") else ():
        if not within(name, *KNOWN_TO_KERNELS):
            yield line, f"a kernel imports {name}"


@rule("from cmoe.custom_ops.triton.route import route", path="cmoe/custom_ops/cpu/route.py")
@rule("import cmoe.custom_ops.cpu", path="cmoe/routed_experts.py")
@rule("from cmoe.custom_ops.triton import route", path="cmoe/custom_ops/route.py")
def backends_are_strangers(module: Module) -> Iterator[Break]:
    if not module.in_package or module.name == BACKEND_LOADER:
        return
    for line, name in imports(module):
        for backend in BACKENDS:
            if within(name, backend) and not within(module.name, backend):
                yield line, f"imports {name}, which only {BACKEND_LOADER} and its own files may"


@rule("from typing import TYPE_CHECKING")
@rule("import typing\nif typing.TYPE_CHECKING:\n    import torch")
def no_type_checking_back_door(module: Module) -> Iterator[Break]:
    for node in ast.walk(module.tree):
        names = [getattr(node, "id", ""), getattr(node, "attr", "")]
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names]
        if "TYPE_CHECKING" in names:
            yield getattr(node, "lineno", 1), "TYPE_CHECKING hides an import"


@rule("def f():\n    from cmoe.config import MoEConfig")
@rule("def f():\n    importlib.import_module('cmoe.config')")
def imports_stand_at_the_top(module: Module) -> Iterator[Break]:
    if not module.in_package or module.name == BACKEND_LOADER:
        return
    for _, function in functions(module):
        for node in ast.walk(function):
            for name in imported(module, node):
                yield node.lineno, f"imports {name} inside a function"
    for name, call in calls(module):
        if name.endswith("import_module") or name == "__import__":
            yield call.lineno, f"{name} imports behind the reader's back"


@rule("from cmoe.config import MoEConfig\nMoEConfig.default = 3", path="cmoe/__init__.py")
@rule("def f(): ...", path="cmoe/quant/__init__.py")
def init_files_only_export(module: Module) -> Iterator[Break]:
    def exports(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return all(re.fullmatch(r"__\w+__", dotted(target)) for target in node.targets)
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)

    if module.in_package and module.is_init:
        for node in module.tree.body:
            if not exports(node):
                yield node.lineno, "an __init__ file imports and exports, nothing else"


# --- plain code -----------------------------------------------------------------------------------


@rule("def f(**kwargs): ...")
@rule("f = lambda **options: 1")
def no_kwargs(module: Module) -> Iterator[Break]:
    if not module.in_package or within(module.name, "cmoe.integrations"):
        return
    lambdas = [("lambda", n) for n in ast.walk(module.tree) if isinstance(n, ast.Lambda)]
    for name, node in [*functions(module), *lambdas]:
        if node.args.kwarg:
            yield node.lineno, f"{name} takes **{node.args.kwarg.arg}: name its parameters"


@rule("hasattr(x, 'a')")
@rule("getattr(x, 'a', None)")
@rule("setattr(x, 'a', 1)")
def no_probing(module: Module) -> Iterator[Break]:
    if not module.in_package or within(module.name, "cmoe.integrations", "cmoe.checkpoint"):
        return
    for name, call in calls(module):
        if name in ("hasattr", "setattr", "delattr") or (name == "getattr" and len(call.args) > 2):
            yield call.lineno, f"{name} probes an object of unknown shape"


@rule("import os\nx = os.environ['A']")
@rule("import os\nx = os.getenv('A')")
@rule("from os import environ")
def environment_is_read_in_one_place(module: Module) -> Iterator[Break]:
    if not module.in_package or module.name == "cmoe.environment":
        return
    for node in ast.walk(module.tree):
        names = [dotted(node)]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name in ("os.environ", "os.getenv", "os.putenv", "os.environb"):
                yield node.lineno, f"{name} outside cmoe/environment.py"


@rule("CACHE = {}")
@rule("seen: list[int] = list()")
@rule("NAMES = weakref.WeakValueDictionary()")
@rule("def f():\n    global x\n    x = 1")
def no_mutable_globals(module: Module) -> Iterator[Break]:
    """A table that nobody changes says so by its type: `Mapping`, `Sequence`, a tuple."""
    containers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
    containers |= {"WeakValueDictionary", "WeakKeyDictionary", "WeakSet", "bytearray"}
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    read_only = r"(typing\.|Final\[)*(Mapping|Sequence|Collection)\b"
    if not module.in_package:
        return
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        made_by = dotted(node.value.func) if isinstance(node.value, ast.Call) else ""
        is_mutable = isinstance(node.value, displays) or made_by.split(".")[-1] in containers
        is_exempt = re.match(read_only, annotation) or dotted(target) == "__all__"
        if is_mutable and not is_exempt:
            yield node.lineno, f"{dotted(target)} is a mutable global"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


@rule("class RouterConfig: ...")
@rule("@dataclass(frozen=True)\nclass RouterConfig: ...")
def configs_are_frozen(module: Module) -> Iterator[Break]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            given = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
            if not any("frozen=True" in d and "kw_only=True" in d for d in given):
                yield node.lineno, f"{node.name} is no frozen keyword-only dataclass"


@rule("class A:\n    @property\n    def top_k(self):\n        return self.config.top_k")
def properties_do_not_forward(module: Module) -> Iterator[Break]:
    for name, node in functions(module):
        body = [s for s in node.body if not isinstance(s, ast.Expr)]
        if "property" in decorators(node) and len(body) == 1 and isinstance(body[0], ast.Return):
            chain = dotted(body[0].value) if body[0].value else ""
            if chain.count(".") > 1:
                yield node.lineno, f"{name} forwards {chain}: let the caller ask its owner"


@rule("@torch.compiler.disable\ndef f(): ...")
def nothing_hides_from_the_compiler(module: Module) -> Iterator[Break]:
    for node in ast.walk(module.tree):
        if dotted(node) in ("torch.compiler.disable", "torch._dynamo.disable"):
            yield node.lineno, f"{dotted(node)} breaks the graph"


@rule("if type(layer).__name__ == 'FusedMoE': ...")
@rule("if 'MoE' in x.__class__.__name__: ...")
def classes_are_not_told_by_name(module: Module) -> Iterator[Break]:
    if not module.in_package or within(module.name, "cmoe.integrations"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare) and ".__name__" in ast.unparse(node):
            yield node.lineno, "compares the name of a class"


# --- words ----------------------------------------------------------------------------------------


@rule('"""Routing and dispatch."""')
@rule("x = 1")
def docstring_says_one_idea(module: Module) -> Iterator[Break]:
    first = (ast.get_docstring(module.tree) or "").partition("\n")[0]
    if not first:
        yield 1, "has no module docstring that says its idea"
    if " and " in first.lower():
        yield 1, f"joins two ideas with 'and': {first}"


@rule("# TODO: faster\n")
@rule("x = 1  # FIXME(me) wrong\n")
def todo_has_an_issue(module: Module) -> Iterator[Break]:
    for line, text in comments(module):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))", text):
            yield line, f"write TODO(#issue), or do it: {text}"


@rule("# The loop is no longer needed.\n")
@rule("# Previously a list.\n")
def comments_tell_no_history(module: Module) -> Iterator[Break]:
    past = r"\b(previously|no longer|formerly|anymore|used to be|we now|now we|refactored)\b"
    for line, text in comments(module):
        if found := re.search(past, text, re.IGNORECASE):
            yield line, f"'{found[0]}' tells history, which git keeps: {text}"


@rule("", path="cmoe/utils.py")
@rule("", path="cmoe/quant/_common.py")
@rule("", path="tests/helpers/__init__.py")
def no_drawers(module: Module) -> Iterator[Break]:
    for part in module.name.split("."):
        if part.strip("_") in ("util", "utils", "common", "helper", "helpers", "misc"):
            yield 1, f"'{part}' says nothing: name what is computed"


@rule("@torch.library.custom_op('cmoe::f', mutates_args=())\ndef f(): ...", "cmoe/custom_ops/f.py")
@rule("_op = define_op('cmoe::f', SCHEMA)", path="cmoe/custom_ops/f.py")
def every_op_has_a_test(module: Module) -> Iterator[Break]:
    folder, _, file = module.path.rpartition("/")
    if folder != "cmoe/custom_ops":
        return
    defining = ("custom_op", "triton_op", "define", "define_op")
    lines = [call.lineno for name, call in calls(module) if name.split(".")[-1] in defining]
    is_defined_here = lines and not any(name == "define_op" for name, _ in functions(module))
    if is_defined_here and f"tests/custom_ops/test_{file}" not in module.sources:
        yield lines[0], f"defines an op, but there is no tests/custom_ops/test_{file}"


# --- the tests ------------------------------------------------------------------------------------


def breaks(rule: Rule, sources: Mapping[str, str]) -> list[str]:
    modules = (Module(path, sources) for path in sources)
    return [f"{m.path}: {text} (line {line})" for m in modules for line, text in rule(m)]


@functools.cache
def repository_breaks(rule: Rule) -> list[str]:
    folders = (REPOSITORY / name for name in ("cmoe", "tests", "bench"))
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    sources = {p.relative_to(REPOSITORY).as_posix(): p.read_text("utf-8") for p in paths}
    return breaks(rule, sources)


def name_of(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_repository_keeps(rule: Rule) -> None:
    found = repository_breaks(rule)
    if unexcused := [line for line in found if not line.startswith(tuple(EXCEPTIONS))]:
        pytest.fail("\n".join(unexcused), pytrace=False)


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_bad_examples_break(rule: Rule) -> None:
    for sources in RULES[rule]:
        assert breaks(rule, sources), sources


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exceptions_are_needed(exception: str) -> None:
    lines = [line for rule in RULES for line in repository_breaks(rule)]
    assert any(line.startswith(exception) for line in lines), "remove it from EXCEPTIONS"


def test_good_code_breaks_no_rule() -> None:
    source = '''"""Routes tokens."""

import functools
from collections.abc import Mapping

from cmoe.config import RouterConfig
from cmoe.errors import UnsupportedError

SCORES: Mapping[str, int] = {"softmax": 0}
NAMES = ("a", "b")


class Router:
    @property
    def num_experts(self):
        return self._num_experts

    def forward(self, x, *, top_k):
        # A command and a reason.
        return getattr(self, "name")  # TODO(#12): faster
'''
    sources = {"cmoe/router/softmax.py": source, "cmoe/config.py": '"""C."""'}
    assert [line for rule in RULES for line in breaks(rule, sources)] == []
