"""What no line of the engine does."""

from __future__ import annotations

import ast

from tests.rules.sources import DECIDING, PACKAGES, calls, imports, python_files, tree

CLOCKS = {
    f"{module}.{name}{suffix}"
    for module in ("time", "datetime", "datetime.datetime", "loop")
    for name in (
        "time",
        "monotonic",
        "perf_counter",
        "process_time",
        "thread_time",
        "clock_gettime",
        "sleep",
        "now",
    )
    for suffix in ("", "_ns")
}
UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
QUEUES = {
    f"{module}{name}"
    for module in ("asyncio.", "queue.", "multiprocessing.", "")
    for name in ("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "JoinableQueue")
}


def deciding_files() -> list[str]:
    return [name for name in python_files("mstar") if name.startswith(DECIDING)]


def test_the_rooms_that_decide_exist() -> None:
    assert len(deciding_files()) > 10


def test_what_decides_reads_no_clock() -> None:
    found = [
        f"{f}:{node.lineno} calls {name}"
        for f in deciding_files()
        for name, node in calls(f)
        if name in CLOCKS
    ]
    found += [
        f"{f}:{line} imports {m}"
        for f in deciding_files()
        for m, line in imports(f)
        if m in CLOCKS | {"time"}
    ]
    assert not found


def test_what_decides_draws_only_from_a_seeded_generator() -> None:
    found = [
        f"{file}:{node.lineno} calls {name}"
        for file in deciding_files()
        for name, node in calls(file)
        if name.startswith(("random.", "secrets.", "np.random.", "uuid."))
        and not (name in ("random.Random", "np.random.default_rng") and node.args)
    ]
    assert not found


def _is_safe(file: str) -> bool:
    """Whether every YAML loader that a file derives from is the safe one."""
    bases = {
        ast.unparse(n) for n in ast.walk(tree(file)) if isinstance(n, ast.Attribute) and "Loader" in n.attr
    }
    return bases == {"yaml.SafeLoader"} or bases == {"yaml.CSafeLoader"}


def test_nothing_is_pickled_or_unpickled() -> None:
    found = [
        f"{file}:{line} imports {module}"
        for file in python_files(*PACKAGES)
        for module, line in imports(file)
        if module.partition(".")[0] in UNPICKLERS
    ]
    found += [
        f"{file}:{node.lineno} calls {name}"
        for file in python_files(*PACKAGES)
        for name, node in calls(file)
        if name in ("torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "eval", "exec")
        or (name == "yaml.load" and not _is_safe(file))
        or (name in ("np.load", "numpy.load") and any(k.arg == "allow_pickle" for k in node.keywords))
    ]
    assert not found


def test_every_queue_is_bounded() -> None:
    found = [
        f"{file}:{node.lineno} makes a {name} without a bound"
        for file in python_files(*PACKAGES)
        for name, node in calls(file)
        if name in QUEUES and (name.endswith("SimpleQueue") or not (node.args or node.keywords))
    ]
    found += [
        f"{file}:{node.lineno} makes a stream without a bound"
        for file in python_files(*PACKAGES)
        for name, node in calls(file)
        if name.startswith("anyio.create_memory_object_stream") and "inf" in ast.unparse(node)
    ]
    assert not found


def test_no_except_without_a_name() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file in python_files(*PACKAGES, "tests")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not found


def test_shared_memory_has_no_fixed_name() -> None:
    found = [
        f"{file}:{node.lineno} names {ast.unparse(node.args[0])}"
        for file in python_files(*PACKAGES)
        for name, node in calls(file)
        if name.endswith("SharedMemory") and node.args and isinstance(node.args[0], ast.Constant)
        if node.args[0].value is not None
    ]
    found += [
        f"{file}:{line} imports {module}, which names and tracks segments by itself"
        for file in python_files(*PACKAGES)
        for module, line in imports(file)
        if module.startswith("multiprocessing.shared_memory")
    ]
    assert not found


def test_only_shm_makes_shared_memory() -> None:
    found = [
        f"{file}:{line} imports {module}"
        for file in python_files("actors", "mstar")
        for module, line in imports(file)
        if module.partition(".")[0] == "posix_ipc"
    ]
    assert not found


def test_a_docstring_begins_with_a_whole_sentence() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{file}: {first!r}"
        for file in python_files(*PACKAGES, "tests")
        for node in ast.walk(tree(file))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if (first := text.partition("\n\n")[0])[-1] not in ".:!?`)"
    ]
    assert not found
