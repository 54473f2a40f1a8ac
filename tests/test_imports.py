"""Imports point downward only: each package may use what stands below it and nothing else."""

from __future__ import annotations

import ast
import pathlib

import jaxserve

ROOT = pathlib.Path(jaxserve.__file__).parent

# What each part of the package may import from jaxserve. Top-level modules count as packages of their own.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "namespaces": set(),
    "timeline": set(),
    "parsers": set(),
    "config": {"parsers"},
    "demo": set(),
    "progress": set(),
    "text": set(),
    "cuda_toolkit": set(),
    "messages": {"timeline", "types"},
    "commands": set(),
    "runner": {"commands", "types"},
    "handover": set(),
    "host_memory": set(),
    "mailboxes": {"messages"},
    "dispatcher": {"messages"},
    "ipc": {"messages", "types"},
    "kernels": {"types"},
    "models": {"demo", "kernels", "progress", "types"},
    "bench": {"aot", "config", "data_parallel", "demo", "types", "messages", "commands", "runner", "executor", "kernels",
              "models", "scheduler", "server", "progress"},
    "metrics": set(),
    "cache": {"namespaces", "runner", "types"},
    "grammar": {"types"},
    "logit_processors": {"types"},
    "aot": {"config", "executor", "kernels", "models"},
    "executor": {"config", "types", "commands", "runner", "handover", "host_memory", "kernels", "models", "progress"},
    "scheduler": {"config", "types", "timeline", "messages", "namespaces", "dispatcher", "commands", "runner", "cache",
                  "grammar", "logit_processors", "metrics", "text"},
    "data_parallel": set(),
    "hosts": {"commands", "messages", "runner"},
    "server": {"config", "data_parallel", "hosts", "types", "timeline", "messages", "dispatcher", "runner", "handover",
               "host_memory", "ipc", "mailboxes", "models", "demo", "namespaces", "scheduler", "executor", "grammar",
               "logit_processors", "metrics", "parsers", "progress", "text"},
    "integrations": {"models", "server"},
    "cli": {"aot", "bench", "config", "types", "server", "models", "demo", "executor", "progress"},
    "__main__": {"cli"},
    "__init__": {"config", "cuda_toolkit", "types", "server"},
}  # fmt: skip

# NumPy-only parts: neither they nor anything they import may pull in JAX.
WITHOUT_JAX = {"types", "namespaces", "timeline", "config", "messages", "commands", "runner", "dispatcher", "hosts", "ipc",
               "cache", "grammar", "host_memory", "logit_processors", "metrics", "parsers", "scheduler", "text"}  # fmt: skip

# Of bench, what needs no JAX.
LIGHT = {"record", "serving"}


def modules() -> list[pathlib.Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: pathlib.Path) -> list[str]:
    """Dotted names of everything a module imports, in functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_point_downward() -> None:
    wrong = []
    for path in modules():
        part = part_of(path)
        for name in imports_of(path):
            if name.startswith("jaxserve."):
                target = name.split(".")[1]
                if target != part and target not in ALLOWED[part]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_host_side_knows_no_jax() -> None:
    for path in modules():
        if part_of(path) in WITHOUT_JAX:
            heavy = [name for name in imports_of(path) if name.split(".")[0] in ("jax", "jaxlib", "flax", "torch")]
            assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_what_loads_a_server_is_light() -> None:
    """`bench serving` measures servers that run elsewhere, from processes that are started by the dozen."""
    for path in [*(ROOT / "bench" / "serving").rglob("*.py"), ROOT / "bench" / "record.py"]:
        names = [name for name in imports_of(path) if name.startswith(("jax.", "jaxlib", "flax", "jaxserve.")) or name == "jax"]
        assert all(name.startswith(("jaxserve.bench.", "jaxserve.demo", "jaxserve.progress")) for name in names), path
        assert not [name for name in names if name.startswith("jaxserve.bench.") and name.split(".")[2] not in LIGHT], path


def test_torch_is_for_tests_only() -> None:
    for path in modules():
        assert not [name for name in imports_of(path) if name.split(".")[0] in ("torch", "optax")], path


def test_pickle_is_for_what_is_code_anyway() -> None:
    for path in modules():
        if path.name != "executable_cache.py":
            assert "pickle" not in imports_of(path), path
