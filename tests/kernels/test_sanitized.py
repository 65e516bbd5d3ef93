"""The compiled kernels' thread pool under the compiler's sanitizers; ``make sanitize`` runs all kernels under them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.native.build import FOLDER, find_compiler

STRESS = Path(__file__).with_name("pool_stress.c")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_pool_is_free_of_races_and_of_wrong_memory(sanitizer: str, tmp_path: Path):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-std=gnu11", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    sources = [str(STRESS), str(FOLDER / "pool.c"), f"-I{FOLDER}"]
    program = tmp_path / "pool_stress"
    built = subprocess.run([*compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True)
    if built.returncode and "sanitize" in built.stderr + built.stdout:
        pytest.skip("this compiler has no such sanitizer")
    assert built.returncode == 0, built.stderr
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []  # what the thread sanitizer counts on
    run = subprocess.run([*fixed_addresses, str(program), "30"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-4000:]
