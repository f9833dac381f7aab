"""Imports point down: the layers of the design, read from the source without importing it."""

import ast
import subprocess
import sys

from tests.run_directories import step_line, write_run
from tests.source_tree import REPOSITORY, Module, imports, modules

COMMANDS = ""  # the modules next to the packages
CORE = ("config", "batching", "parallel", "models", "data", "training")
ROOMS = (
    "kernels",
    "operations",
    "preparation",
    "hf",
    "inference",
    "post_training",
    "analysis",
)
LAYERS = {
    **{package: layer for layer, package in enumerate(CORE)},
    "data": CORE.index("models"),  # which do not know each other
    **{package: len(CORE) + place for place, package in enumerate(ROOMS)},
    COMMANDS: 100,
}
"""A package imports from lower layers: the core no room, a room the core and the rooms before it."""
CONSOLE = "maxtext_lite.console"  # imported before everything else
# Who alone may name what: a package, or a module.
OWNERS = {
    "PartitionSpec": "maxtext_lite.parallel.mesh",
    "flax": "maxtext_lite.models",
    "torch": "maxtext_lite.hf",
    "transformers": "maxtext_lite.hf",
}
UNKNOWN_TO_MODELS = (
    "load_config make_plan BatchPlan BatchConfig MeshConfig Mesh make_mesh"
)


def internal_imports(module: Module) -> dict[str, int]:
    """The modules of maxtext_lite that a module imports, with the line of each."""
    return {
        found.module: found.line
        for found in imports(module)
        if found.module in modules()
    }


def test_a_module_imports_from_lower_layers_or_its_own_package_only():
    for module in modules().values():
        for name, line in internal_imports(module).items():
            package = modules()[name].package
            is_below = (
                name == CONSOLE
                or package == module.package
                or LAYERS[package] < LAYERS[module.package]
            )
            assert is_below, f"{module.where(line)} imports {name}"


def test_every_package_is_part_of_the_core_or_a_room():
    packages = {module.package for module in modules().values()}
    assert packages == {*CORE, *ROOMS, COMMANDS}
    for room in ROOMS:
        assert not modules()[f"maxtext_lite.{room}"].tree.body[1:], room


def test_no_modules_import_each_other_in_a_circle():
    finished = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in finished:
            for imported in internal_imports(modules()[name]):
                visit(imported, [*path, name])
            finished.add(name)

    for name in modules():
        visit(name, [])


def words(module: Module) -> set[str]:
    """Every name that a module imports, reads or takes from something."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(node.module.split(".")[:1])
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def test_what_has_one_owner_is_named_by_no_other():
    for module in modules().values():
        named = words(module)
        for word, owner in OWNERS.items():
            assert word not in named or module.name.startswith(owner), (
                f"{module.where()} names {word}"
            )
        assert module.package != "models" or not named & set(
            UNKNOWN_TO_MODELS.split()
        ), module.where()


WITHOUT_JAX = """
import sys
from maxtext_lite import advise, config, batching, plan, report
tried = [
    plan.main(["--devices", "4096", "--hosts", "1024", "ici_data_parallelism=-1", "ici_fsdp_parallelism=1"]),
    plan.main(["num_epochs=2"]),
    plan.main(["--devices", "8", "--device", "v5e", "global_batch_size=16", "per_device_batch_size=auto"]),
    advise.main(["--tokens", "1e9"]),
    report.main(sys.argv[1:]),
]
assert tried == [0] * len(tried)
assert not {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "torch"} & set(sys.modules)
"""


def test_plan_advise_and_report_run_without_jax(tmp_path):
    run = write_run(tmp_path / "run", [step_line(1)], [])
    command = [sys.executable, "-c", WITHOUT_JAX, str(run)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300
    )
    assert result.returncode == 0, result.stderr
