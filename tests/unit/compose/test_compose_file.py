"""What compose/compose.yaml promises, apart from running it (which ``make compose-test`` does)."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from compose.plan import STOP_MARGIN_S

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "compose"
OURS = ("gateway", "prefill", "decode")
WORKERS = ("prefill", "decode")


def services(name: str = "compose.yaml") -> dict[str, Any]:
    """Return the services of a compose file."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())["services"]
    return found


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions in a requirements file by normalised name."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pairs = [line.split(";")[0].split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {normal(package): version.strip() for package, version in pairs}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_workers_can_be_scaled() -> None:
    for name in WORKERS:
        assert not {"container_name", "ports", "hostname"} & services()[name].keys()


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in services().values() for port in service.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_containers_are_stopped_after_they_have_drained() -> None:
    for name in OURS:
        service = services()[name]
        drain_s = float(service["environment"]["BATON_DRAIN_SECONDS"])
        assert float(service["stop_grace_period"].removesuffix("s")) >= drain_s + STOP_MARGIN_S


def test_workers_remember_their_roles_in_a_volume_that_their_image_lets_them_write_to() -> None:
    made = re.findall(r"install -d -o baton -g baton (.+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    for name in WORKERS:
        service = services()[name]
        folder = service["environment"]["BATON_ROLE_DIR"]
        assert folder in service["volumes"], "a volume without a name: it ends with its containers"
        assert folder in made[0].split()


def test_redis_refuses_rather_than_forgets() -> None:
    command = services()["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_nothing_may_gain_rights_or_write_beside_its_volumes() -> None:
    for service in services().values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True


def test_every_setting_is_in_the_example() -> None:
    used = {
        name
        for file in ("compose.yaml", "compose.gpu.yaml")
        for name in re.findall(r"\$\{([A-Z_]+)", (FOLDER / file).read_text())
    }
    used.add("BATON_API_KEY")  # passed on by its name alone
    described = set(re.findall(r"^# ([A-Z_]+)=", (FOLDER / ".env.example").read_text(), re.MULTILINE))
    assert described == used


def test_the_examples_defaults_are_the_files() -> None:
    example = dict(re.findall(r"^# ([A-Z_]+)=(.*)$", (FOLDER / ".env.example").read_text(), re.MULTILINE))
    for file in ("compose.yaml", "compose.gpu.yaml"):
        for name, default in re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", (FOLDER / file).read_text()):
            assert example[name] == default, name


def test_gpu_workers_see_all_gpus_and_claim_one() -> None:
    for name in WORKERS:
        service = services("compose.gpu.yaml")[name]
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
        claim, base = service["command"], services()[name]["command"]
        assert claim[:4] == ["python", "-m", "compose.gpu_claim", "/cache/gpus"]
        assert claim[4:] == base


def test_the_image_has_what_is_copied() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in kept, name


def test_a_gateways_packages_are_part_of_the_lock_and_have_no_torch() -> None:
    gateway, lock = pins("gateway.txt"), pins("lock.txt")
    assert gateway.items() <= lock.items()
    assert not {"torch", "triton", "transformers", "numba", "numpy"} & gateway.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {normal(name) for name in project["dependency-groups"]["gateway"]}
    assert wanted <= gateway.keys()
    assert wanted <= {normal(re.split("[>=;]", name)[0]) for name in project["project"]["dependencies"]}


@pytest.mark.parametrize("module", ["gateway.main", "compose.commands", "compose.secret_file"])
def test_what_a_gateways_image_imports_is_in_it(module: str) -> None:
    listed = subprocess.run(
        (sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"), capture_output=True, text=True, check=True
    ).stdout.split()
    owners = importlib.metadata.packages_distributions()
    imported = {normal(owner) for name in listed for owner in owners.get(name.split(".")[0], ())}
    optional = {"cryptography", "cffi", "pycparser", "sniffio", "setuptools", "hiredis"}  # used where they happen to be
    assert imported - optional - {"baton"} <= pins("gateway.txt").keys()
