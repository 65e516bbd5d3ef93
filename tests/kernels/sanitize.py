"""Run the tests of the compiled kernels with the address and undefined-behaviour sanitizers built in.

    python -m tests.kernels.sanitize [pytest's options]

Works on a copy of ``kernels`` and ``tests``, so that the library beside the sources stays as it is. Python itself is
not built with the sanitizer, so the sanitizer's library is loaded before it, and leaks are not looked for.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.cpu.native.build import LIBRARY, build, find_compiler

_ROOT = Path(__file__).parents[2]
_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
_TESTS = tuple(f"tests/kernels/test_{name}.py" for name in ("native", "paged_attention", "chunk_attention", "store_kv"))
_IGNORED = shutil.ignore_patterns("__pycache__", LIBRARY.name)


def main() -> int:
    """Build, run, and return pytest's exit status."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("there is no C compiler")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for folder in ("kernels", "tests"):
            shutil.copytree(_ROOT / folder, copy / folder, ignore=_IGNORED)
        shutil.copy(_ROOT / "pyproject.toml", copy)
        reason = build(copy / LIBRARY.relative_to(_ROOT), _FLAGS)
        if reason is not None:
            raise SystemExit(reason)
        command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", *_TESTS, *sys.argv[1:]]
        return subprocess.run(command, cwd=copy, env=_environment(compiler, copy)).returncode


def _environment(compiler: list[str], copy: Path) -> dict[str, str]:
    command = [*compiler, "-print-file-name=libasan.so"]
    preload = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return os.environ | options | {"LD_PRELOAD": preload, "PYTHONPATH": str(copy)}


if __name__ == "__main__":
    raise SystemExit(main())
