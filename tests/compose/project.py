"""A compose project that belongs to one test run: its containers, found by their labels, and its gateway."""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Tools:
    """The commands that drive containers, each as words."""

    engine: tuple[str, ...]
    """For single containers: ``docker`` or ``podman``."""
    build: tuple[str, ...]
    """Builds one image."""
    compose: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> "Tools":
        """Read ENGINE, BUILD and COMPOSE; what is missing follows from the engine, which is docker by default."""
        engine = tuple(shlex.split(os.environ.get("ENGINE") or "docker"))
        build = tuple(shlex.split(os.environ.get("BUILD", "")))
        compose = tuple(shlex.split(os.environ.get("COMPOSE", "")))
        return cls(engine, build or (*engine, "build"), compose or (*engine, "compose"))


class Project:
    """Owns everything that it starts, until :meth:`remove`. Settings are what a user would write in ``.env``."""

    def __init__(self, tools: Tools, name: str, settings: Mapping[str, str], port: int) -> None:
        self._tools = tools
        self._name = name
        self.settings = settings
        self._env = {**os.environ, **settings, "BATON_PORT": str(port)}
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120.0)

    def build(self, target: str, image: str) -> None:
        """Build one image of compose/Dockerfile; ``TORCH_INDEX`` goes along where it is set."""
        index = [f"--build-arg=TORCH_INDEX={self._env['TORCH_INDEX']}"] if "TORCH_INDEX" in self._env else []
        self._run(*self._tools.build, "-f", "compose/Dockerfile", "--target", target, *index, "-t", image, ".")

    def up(self, *services: str, prefill: int, decode: int) -> None:
        """Start, or scale, without building."""
        counts = {"BATON_PREFILL": str(prefill), "BATON_DECODE": str(decode)}
        words = (*self._compose(), "up", "-d", "--no-build")
        if "podman" in self._run(*self._tools.compose, "version"):  # takes --scale once or not at all
            self._env |= counts  # as in .env
            self._run(*words, *services)
        else:
            self._run(*words, "--scale", f"prefill={prefill}", "--scale", f"decode={decode}", *services)

    def has_image(self, image: str) -> bool:
        """Say whether an image is here or can be had."""
        try:
            self.engine("image", "inspect", image)
        except RuntimeError:
            try:
                self.engine("pull", image)
            except RuntimeError:
                return False
        return True

    def stop(self) -> None:
        """Stop all containers as an operator does."""
        self._run(*self._compose(), "stop")

    def remove(self) -> None:
        """Remove containers, networks and volumes; nothing is left to remove the second time."""
        self._run(*self._compose(), "down", "-v", may_fail=True)
        if left := self.containers(all_states=True):  # of a podman-compose that counts from 1 again
            self._run(*self._tools.engine, "rm", "-f", *left, may_fail=True)
            self._run(*self._compose(), "down", "-v", may_fail=True)
        self.client.close()

    def logs(self) -> str:
        """Return what all containers have said lately."""
        return self._run(*self._compose(), "logs", "--tail", "30", may_fail=True)

    def containers(self, service: str = "", *, all_states: bool = False) -> list[str]:
        """Return the ids of the containers of one service, or of all."""
        label = f"label=com.docker.compose.service={service}"
        return self.engine(
            "ps",
            "-q",
            *(("-a",) if all_states else ()),
            *("--filter", f"label=com.docker.compose.project={self._name}"),
            *(("--filter", label) if service else ()),
        ).split()

    def engine(self, *arguments: str) -> str:
        """Run the engine and return what it prints."""
        return self._run(*self._tools.engine, *arguments).strip()

    def inspect(self, container: str, template: str) -> str:
        """Return one property of a container."""
        return self.engine("inspect", "--format", template, container)

    def is_healthy(self, container: str) -> bool:
        """Say what the container's health check finds."""
        if Path(self._tools.engine[0]).name != "podman":
            return self.inspect(container, "{{.State.Health.Status}}") == "healthy"
        try:
            self.engine("healthcheck", "run", container)  # without systemd it has no timer for it
        except RuntimeError:
            return False
        return True

    def wait(self, what: str, is_so: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Wait until ``is_so``; raises TimeoutError that says ``what``."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {limit_s:g} s")
            time.sleep(0.5)

    def status(self, path: str) -> int:
        """Return the status with which the gateway answers, 0 when it does not."""
        try:
            return self.client.get(path).status_code
        except httpx2.HTTPError:
            return 0

    def _compose(self) -> tuple[str, ...]:
        # the podman-compose of Debian 12 has no profiles, and all services
        has_profiles = "--profile" in self._run(*self._tools.compose, "--help")
        profile = ("--profile", "observability") if has_profiles else ()
        return (*self._tools.compose, *profile, "-p", self._name, "-f", "compose/compose.yaml")

    def _run(self, *words: str, env: Mapping[str, str] | None = None, may_fail: bool = False) -> str:
        ended = subprocess.run(words, cwd=ROOT, env=env or self._env, capture_output=True, text=True, check=False)
        if ended.returncode and not may_fail:
            tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-40:])
            raise RuntimeError(f"{shlex.join(words)} ended with {ended.returncode}:\n{tail}")
        return ended.stdout
