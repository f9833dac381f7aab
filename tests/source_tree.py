"""The source of maxtext_lite as syntax trees, for the tests of its structure. Nothing here imports it."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "maxtext_lite"


@dataclass(frozen=True)
class Import:
    """One imported module, `maxtext_lite.config.load` or `jax.numpy`, and the line that imports it."""

    module: str
    line: int


@dataclass(frozen=True)
class Module:
    """One source file of maxtext_lite."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The first name below maxtext_lite that is a folder; "" for the modules beside it (the commands)."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    @property
    def is_init(self) -> bool:
        """Whether this is the __init__.py of a package."""
        return self.path.name == "__init__.py"

    def where(self, line: int = 1) -> str:
        """path:line, as an editor takes it."""
        return f"{self.path.relative_to(REPOSITORY)}:{line}"


@functools.cache
def modules() -> dict[str, Module]:
    """Every module of maxtext_lite by its dotted name; a package is its __init__.py."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["maxtext_lite", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(
            name, path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        )
    return found


def imports(module: Module, *, at_import_time_only: bool = False) -> Iterator[Import]:
    """The modules that a module imports, those of `if TYPE_CHECKING:` left out.

    Args:
      at_import_time_only: leave out the imports inside functions, which run only when called.
    """
    for node in _statements(module.tree, at_import_time_only):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield Import(name if name in modules() else source, node.lineno)


def _statements(node: ast.AST, at_import_time_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if at_import_time_only and isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            continue
        yield child
        yield from _statements(child, at_import_time_only)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".") if module.is_init else module.name.split(".")[:-1]
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
