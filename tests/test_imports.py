"""The direction of imports: accounting and jaxpriv stand alone, trainers stand on both."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = {"jaxpriv", "trainers", "accounting", "colab", "tests"}
MAY_IMPORT = {
    "accounting": {"accounting"},
    "jaxpriv": {"jaxpriv"},
    "trainers": {"trainers", "jaxpriv", "accounting"},
}
FORBIDDEN = {
    "accounting": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "jaxpriv": {"flax", "orbax", "matplotlib", "tyro", "pyarrow", "dp_accounting", "scipy"},
    "trainers": set(),
}


def imported_roots(path: pathlib.Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").split(".")[0])
    return roots


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_downwards(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        roots = imported_roots(path)
        assert not (roots & OURS) - MAY_IMPORT[package], path
        assert not roots & FORBIDDEN[package], path


def test_only_one_module_imports_orbax():
    users = [p for p in (ROOT / "trainers").rglob("*.py") if "orbax" in imported_roots(p)]
    assert [p.relative_to(ROOT).as_posix() for p in users] in ([], ["trainers/common/checkpoint.py"])


def test_top_level_holds_what_was_agreed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    agreed = {"pyproject.toml", "README.md", "jaxpriv", "trainers", "accounting", "tests", "colab"}
    assert {name for name in top if not name.startswith(".")} <= agreed


def test_accounting_loads_neither_jax_nor_scipy():
    code = (
        "import sys, accounting; "
        "print([m for m in ('jax', 'scipy', 'dp_accounting', 'matplotlib', 'tyro') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
