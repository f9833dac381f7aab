"""Imports point down: the layers of the design, read from the source without importing it."""

import ast
import subprocess
import sys

from tests.source_tree import REPOSITORY, Module, imports, modules

COMMANDS = ""  # the modules next to the packages
LAYERS = {
    "process": -1,  # imported before everything else
    "config": 0,
    "batching": 1,
    "xla": 2,
    "reporting": 2,
    "parallel": 3,
    "models": 4,
    "data": 4,
    "hf": 5,  # a run may begin with a Hugging Face directory
    "training": 6,
    "generation": 7,
    "aot": 7,
    "rl": 8,
    COMMANDS: 9,
}
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "torch", "transformers", "tensorboardX"}


def internal_imports(module: Module) -> dict[str, int]:
    """The modules of maxtext_lite that a module imports, with the line of each."""
    return {found.module: found.line for found in imports(module) if found.module in modules()}


def top_level(name: str) -> str:
    return name.partition(".")[0]


def test_a_module_imports_from_lower_layers_or_its_own_package_only():
    offences = []
    for module in modules().values():
        assert module.package in LAYERS, f"{module.where()}: design.md has no layer for '{module.package}'"
        for name, line in internal_imports(module).items():
            package = modules()[name].package
            if package != module.package and LAYERS[package] >= LAYERS[module.package]:
                offences.append(
                    f"{module.where(line)}: layer {LAYERS[module.package]} imports {name}, layer {LAYERS[package]}"
                )
    assert not offences, "\n".join(offences)


def test_every_internal_import_names_a_module_that_exists():
    offences = [
        f"{module.where(found.line)}: {found.module}"
        for module in modules().values()
        for found in imports(module)
        if top_level(found.module) == "maxtext_lite" and found.module not in modules()
    ]
    assert not offences, "\n".join(offences)


def test_no_modules_import_each_other_in_a_circle():
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for imported in internal_imports(modules()[name]):
            if circle := visit(imported, [*path, name]):
                return circle
        finished.add(name)
        return []

    for name in modules():
        circle = visit(name, [])
        assert not circle, " -> ".join(circle)


def imported_with(name: str) -> set[str]:
    """Everything outside maxtext_lite that `import name` brings in, through maxtext_lite's own modules."""
    seen: set[str] = set()
    external: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if parent := current.rpartition(".")[0]:
            waiting.append(parent)
        for found in imports(modules()[current], at_import_time_only=True):
            if found.module in modules():
                waiting.append(found.module)
            else:
                external.add(top_level(found.module))
    return external


WITHOUT_JAX = [
    name
    for name, module in modules().items()
    if module.package in ("config", "batching", "reporting")
    or name in ("maxtext_lite", "maxtext_lite.cli", "maxtext_lite.plan", "maxtext_lite.report")
]


def test_config_batching_plan_and_report_import_no_jax_by_their_source():
    for name in WITHOUT_JAX:
        assert not imported_with(name) & HEAVY, name
        if modules()[name].package in ("config", "batching", "reporting"):
            assert not lines_importing(modules()[name], HEAVY), "not even inside a function"


def test_config_batching_plan_and_report_import_no_jax_when_run():
    assert "maxtext_lite.plan" in WITHOUT_JAX
    program = f"import sys\nimport {', '.join(WITHOUT_JAX)}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_generating_imports_nothing_that_only_training_and_its_checkpoints_need():
    assert not imported_with("maxtext_lite.generation.answering") & {"orbax", "grain", "tensorboardX"}


def lines_importing(module: Module, packages: set[str]) -> list[str]:
    return [module.where(found.line) for found in imports(module) if top_level(found.module) in packages]


def lines_naming(module: Module, words: set[str]) -> list[str]:
    return [f"{module.where(line)}: {name}" for name, line in names(module) if name in words]


def test_flax_is_imported_only_in_models():
    for module in modules().values():
        assert module.package == "models" or not lines_importing(module, {"flax"})


def test_only_hf_knows_torch_and_transformers():
    for module in modules().values():
        assert module.package == "hf" or not lines_importing(module, {"torch", "transformers"})


def test_models_never_see_a_config_file_a_mesh_or_a_batch_size():
    forbidden = {"load_config", "make_plan", "BatchPlan", "BatchConfig", "MeshConfig", "Mesh", "make_mesh"}
    for module in modules().values():
        assert module.package != "models" or not lines_naming(module, forbidden)


def test_only_parallel_axes_writes_a_partition_spec():
    for module in modules().values():
        assert module.name == "maxtext_lite.parallel.axes" or not lines_naming(module, {"PartitionSpec"})


def test_no_module_is_named_after_nothing():
    empty_names = {"utils", "util", "common", "misc", "helpers", "helper", "tools"}
    assert not empty_names & {part for name in modules() for part in name.split(".")}


def test_no_exception_is_swallowed():
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{module.where(node.lineno)}: bare except"
                swallowed = all(isinstance(statement, ast.Pass) for statement in node.body)
                assert not swallowed, f"{module.where(node.lineno)}: except: pass"


def test_no_key_of_the_config_has_a_second_default():
    for module in modules().values():
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3):
                continue
            of_a_config = "config" in ast.unparse(node.args[0]).lower() and isinstance(node.args[1], ast.Constant)
            assert not of_a_config, f"{module.where(node.lineno)}: {ast.unparse(node)}"


def names(module: Module) -> list[tuple[str, int]]:
    """Every name that a module imports, reads or takes from something, with its line."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.alias):
            found.append((node.name.rpartition(".")[2], node.lineno))
        elif isinstance(node, ast.Name):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute):
            found.append((node.attr, node.lineno))
    return found
