"""The package's layers: a module imports only from its own layer or from lower ones, also late."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "fedseal"

# From the bottom up. An entry is a module, or a folder with everything in it that has no entry of its own.
LAYERS = [
    ["errors"],
    ["system"],
    ["config.sections", "config.__init__"],
    ["paper", "losses", "weights"],
    ["aggregate"],
    ["data"],
    ["models"],
    ["core"],
    ["learn"],
    ["methods"],
    ["config"],
    ["run_setup", "replies"],
    ["rounds"],
    ["engines"],
    ["storage"],
    ["report"],
    ["training"],
    ["deploy", "reproduce"],
    ["cli"],
    ["__init__", "__main__"],
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))
}


def height(module: str) -> int:
    """The layer of a module, by the longest entry that covers it."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (found := HEIGHT.get(".".join(parts[:end]))) is not None:
            return found
    raise KeyError(f"{module} is in no layer: add it to LAYERS")


def resolve(dotted: str) -> str | None:
    """The module of the package behind a dotted name such as fedseal.core.Packet; None outside of it."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), -1, -1):
        for name in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if name in MODULES:
                return name
    return None


def dependencies(path: Path) -> set[str]:
    """All modules of the package that a file imports: at the top, late, for types, or by name in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = (
                [node.value.partition(":")[0]] if re.fullmatch(r"fedseal(\.\w+)+(:\w+)?", node.value) else []
            )
        found |= {module for name in names if name.split(".")[0] == "fedseal" and (module := resolve(name))}
    return found - {"__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_below(module: str) -> None:
    for other in dependencies(MODULES[module]):
        assert height(other) <= height(module), f"{module} imports {other}, which is in a layer above it"


def test_there_is_no_import_cycle() -> None:
    graph = {module: dependencies(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_dependencies_of_a_file_are_found(tmp_path: Path) -> None:
    """The check itself: every way to import counts."""
    file = tmp_path / "file.py"
    file.write_text(
        "import fedseal.core\n"
        "from fedseal import paper\n"
        "from fedseal.data.pool import Pool\n"
        "def late():\n    from fedseal.report import charts\n"
        'lazy = LazyModule("fedseal.training.train")\n'
        'engine = "fedseal.engines.local:LocalEngine"\n'
        'log = getLogger("fedseal")\n'
    )
    assert dependencies(file) == {
        "core", "paper", "data.pool", "report.charts", "training.train", "engines.local",
    }  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_too_long(module: str) -> None:
    assert len(MODULES[module].read_text("utf-8").splitlines()) <= 350


@pytest.mark.parametrize("module", MODULES)
def test_late_imports_go_through_lazy(module: str) -> None:
    """One way to import late: no import statement below the top level (except for types)."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nested = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not nested, f"{module} imports late in lines {nested}: use fedseal.system.lazy"
