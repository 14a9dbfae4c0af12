"""The package's layers: a module imports only from its own layer or lower ones, lazy imports included."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "fedseal"

# From bottom to top. An entry is a module, or a folder with all of its modules that have no separate entry.
LAYERS = [
    ["errors"],
    ["system"],
    ["config.sections", "config.__init__"],
    ["paper", "losses", "label_shift", "weights"],
    ["robust"],
    ["aggregate", "privacy", "secure"],
    ["data"],
    ["pretrained"],
    ["models"],
    ["frozen"],
    ["core"],
    ["learn", "features"],
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
    """The layer of a module, given by its most specific entry."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (layer := HEIGHT.get(".".join(parts[:end]))) is not None:
            return layer
    raise KeyError(f"{module} is in no layer: add it to LAYERS")


def resolve(dotted: str) -> str | None:
    """The module that a dotted name such as fedseal.core.Packet belongs to, or None."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), -1, -1):
        for name in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if name in MODULES:
                return name
    return None


def dependencies(path: Path) -> set[str]:
    """Modules of the package that a file imports, at the top, in functions, for types or by a string."""
    modules: set[str] = set()
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
        modules |= {module for name in names if name.split(".")[0] == "fedseal" and (module := resolve(name))}
    return modules - {"__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_from_its_own_or_lower_layers(module: str) -> None:
    for other in dependencies(MODULES[module]):
        assert height(other) <= height(module), f"{module} imports {other}, which is in a higher layer"


def test_no_import_cycles() -> None:
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


def test_dependencies_cover_every_kind_of_import(tmp_path: Path) -> None:
    """Guards the tests above, which see only what `dependencies` returns."""
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
def test_no_source_file_has_more_than_350_lines(module: str) -> None:
    assert len(MODULES[module].read_text("utf-8").splitlines()) <= 350


@pytest.mark.parametrize("module", MODULES)
def test_functions_contain_no_imports(module: str) -> None:
    """Modules that are imported lazily go through `fedseal.system.lazy`."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nested = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not nested, f"{module} has imports in functions, in lines {nested}: use fedseal.system.lazy"
