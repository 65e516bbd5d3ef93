"""Compiles the C sources of this folder into one shared library. Standard library only: the package's build runs it.

Each level of instruction set is the same source, compiled with the flags that allow its instructions. No compiler, or
one that fails, means no library: Baton then runs without it, only slower.
"""

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libbaton_cpu.so"

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-pthread")
_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}


def build(library: Path = LIBRARY, extra_flags: Sequence[str] = ()) -> str | None:
    """Write ``library``; return why it was not possible, or None. One of an earlier build is removed first."""
    library.unlink(missing_ok=True)
    compiler = find_compiler()
    if compiler is None:
        return "there is no C compiler (CC, cc, gcc or clang)"
    try:
        with tempfile.TemporaryDirectory() as directory:
            _compile(compiler, extra_flags, Path(directory), library)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"the C compiler failed: {detail.strip()[-2000:]}"
    return None


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler: what CC says, or the first that is found."""
    named = shlex.split(os.environ.get("CC", ""))
    for candidate in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    return None


def _compile(compiler: Sequence[str], extra_flags: Sequence[str], directory: Path, library: Path) -> None:
    units = {"pool": ("pool.c", ()), "dispatch": ("dispatch.c", ()), "portable": ("level.c", ("-DLEVEL=portable",))}
    if platform.machine() in ("x86_64", "AMD64"):
        units |= {name: ("level.c", (f"-DLEVEL={name}", *flags)) for name, flags in _LEVELS.items()}
    objects = []
    for name, (source, flags) in units.items():
        objects.append(str(directory / f"{name}.o"))
        _run([*compiler, *_FLAGS, *flags, *extra_flags, "-c", str(FOLDER / source), "-o", objects[-1]])
    linked = directory / library.name
    _run([*compiler, *extra_flags, "-shared", "-pthread", *objects, "-lm", "-o", str(linked)])
    shutil.move(linked, library)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
