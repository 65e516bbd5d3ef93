"""The package's build: compiles the CPU kernels where there is a C compiler, and goes on without them where not."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface[Any]):
    """Puts the compiled library beside its sources: into the wheel, or into the tree that an editable install uses."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; ``version`` is ``standard`` or ``editable``."""
        script = Path(self.root) / "kernels" / "cpu" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("build_native_kernels", script)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        reason = native.build()
        if reason is not None:
            self.app.display_warning(f"the CPU kernels are not compiled, Baton will run slower: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(native.LIBRARY.relative_to(self.root)))
