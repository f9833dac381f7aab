"""Every module has its test file, every public name a docstring, every key a field and a comment."""

import ast
import re
from types import SimpleNamespace

from maxtext_lite.config import KEYS
from tests.conftest import FOLDERS, STAND_INS, fast_tests, file_of
from tests.source_tree import PACKAGE, REPOSITORY, Module, modules

TESTS = REPOSITORY / "tests"

# Files in tests/ that test no one module, and folders that hold only such files.
STRUCTURAL = {"test_layers.py", "test_mirror.py", "test_packaging.py", "test_scripts.py"}
STRUCTURAL_FOLDERS = {"docs", "scripts", "invariance", "golden"}

BASE_YML = (REPOSITORY / "configs" / "base.yml").read_text(encoding="utf-8")


def test_every_module_has_its_test_file():
    missing = []
    for module in modules().values():
        relative = module.path.relative_to(PACKAGE)
        expected = TESTS / relative.parent / f"test_{relative.name}"
        if not module.is_init and module.path.name != "__main__.py" and not expected.is_file():
            missing.append(f"{module.where()} has no {expected.relative_to(REPOSITORY)}")
    assert not missing, "\n".join(missing)


def test_every_test_file_has_its_module():
    strays = []
    for path in sorted(TESTS.rglob("test_*.py")):
        relative = path.relative_to(TESTS)
        if relative.parts[0] in STRUCTURAL_FOLDERS or str(relative) in STRUCTURAL:
            continue
        expected = PACKAGE / relative.parent / relative.name.removeprefix("test_")
        if not expected.is_file():
            strays.append(f"{path.relative_to(REPOSITORY)} has no {expected.relative_to(REPOSITORY)}")
    assert not strays, "\n".join(strays)


def test_every_test_file_holds_a_test():
    empty = [
        str(path.relative_to(REPOSITORY))
        for path in sorted(TESTS.rglob("test_*.py"))
        if not re.search(r"^\s*(async )?def test_", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not empty, "\n".join(empty)


def test_every_test_file_has_a_place_in_the_order_and_a_part_in_fast_or_a_stand_in():
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    assert {file.parent.as_posix() for file in files} == set(FOLDERS)
    names = {file.as_posix() for file in files}
    assert STAND_INS.keys() | set(STAND_INS.values()) <= names
    assert not STAND_INS.keys() & set(STAND_INS.values())
    items = [
        SimpleNamespace(path=TESTS / file, name=f"{test}[{case}]", originalname=test, get_closest_marker=lambda _: None)
        for file in files
        for test in ("test_one", "test_two")
        for case in range(2)
    ]
    marked = next(item for item in items if item.name == "test_two[0]" and item.path == TESTS / "test_train.py")
    marked.get_closest_marker = lambda name: name == "fast"
    chosen = {}
    for item in fast_tests(items):
        chosen.setdefault(file_of(item), []).append(item.name)
    assert chosen.keys() == names - STAND_INS.keys()
    assert chosen["config/test_load.py"] == ["test_one[0]", "test_two[0]"]
    assert chosen["training/test_loop.py"] == ["test_one[0]"]
    assert chosen["test_train.py"] == ["test_two[0]"]


def test_every_public_name_has_a_docstring():
    missing = []
    for module in modules().values():
        if not ast.get_docstring(module.tree):
            missing.append(f"{module.where()}: the module")
        missing += undocumented(module, module.tree.body)
    assert not missing, "\n".join(missing)


def undocumented(module: Module, body: list[ast.stmt], owner: str = "") -> list[str]:
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overrides = any("override" in ast.unparse(decorator) for decorator in node.decorator_list)
            overloads = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not ast.get_docstring(node) and not overrides and not overloads:
                found.append(f"{module.where(node.lineno)}: {owner}{node.name}")
            if isinstance(node, ast.ClassDef):
                found += undocumented(module, node.body, f"{node.name}.")
    return found


def yaml_keys() -> list[str]:
    return re.findall(r"^(\w+):", BASE_YML, re.MULTILINE)


def test_base_yml_and_the_schema_have_the_same_keys():
    keys = yaml_keys()
    assert len(keys) == len(set(keys)), "a key stands twice in configs/base.yml"
    assert set(keys) - set(KEYS) == set(), "in configs/base.yml but not in the schema"
    assert set(KEYS) - set(keys) == set(), "in the schema but not in configs/base.yml"


def test_every_key_of_base_yml_has_a_trailing_comment():
    lines = [line for line in BASE_YML.splitlines() if re.match(r"\w+:", line)]
    assert not [line for line in lines if not re.search(r"\S\s+# \S.{5,}", line)]


def test_base_yml_has_at_most_170_keys():
    assert len(yaml_keys()) <= 170
