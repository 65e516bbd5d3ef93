"""Everything on one GPU, built, checked and timed by one command, without a network.

    python -m benchmarks.gpu [--only kernels models handover serving] [--models 1B Llama-3-8B Qwen3-8B] [--sweep]
                             [--profile] [--dry-run]

Ceilings are measured first: a large copy and a large matrix product. Each kernel then stands beside its floor and
torch's own attention, whole models with random weights beside the bytes and operations that a step cannot do without,
and a hand-over between two processes is split into control and bytes. At last a prefill and a decode worker serve on
the same GPU, with steps launched ahead and without. What cannot be measured says so; one failure does not stop the
rest. ``--sweep`` tries other tiles, ``--profile`` shows where a step's time goes, ``--dry-run`` serves a tiny model on
the CPU, to see that this runs.
"""

import argparse
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from benchmarks import gpu_kernels, gpu_models, gpu_serving
from benchmarks.gpu_timing import Ceilings, measure_ceilings

if TYPE_CHECKING:
    from benchmarks.gpu_handover import HandoverFigure

NOT_MEASURED = "not measured"
PARTS = ("kernels", "models", "handover", "serving")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of the design that a table row answers."""

    row: str
    text: str


GOALS = (
    Goal("paged_attention 64 x 2000", "decode attention at 85 % of copy bandwidth; 1.05 x contiguous SDPA"),
    Goal("decode 64 x 2000", "decode step at most 1.2 x its floor"),
    Goal("prefill 8000", "prefill at 60 % of the matrix rate"),
    Goal("serving 1P+1D", "TTFT, ITL, tokens/s, and a hand-over split into control and bytes"),
)


class Report:
    """Prints tables as they fill; a row that fails is a row that says so."""

    def __init__(self) -> None:
        self._console = Console(width=130)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def table(self, title: str, *columns: str) -> Table:
        """Return an empty table."""
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        return table

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def tried(self, run: Callable[[], Result]) -> Result | None:
        """Return what ``run`` returns, or None after printing why it failed."""
        try:
            return run()
        except Exception:  # noqa: BLE001 - the other rows are worth having
            self.say(traceback.format_exc(limit=-6))
            return None
        finally:
            torch.cuda.empty_cache()


def show_kernels(report: Report, ceilings: Ceilings) -> None:
    """Measure and print each kernel."""
    table = report.table(
        "kernels, one layer of Llama-3-8B in bfloat16", "kernel", "ms", "of its floor", "x SDPA", "x Flex"
    )
    for measure in gpu_kernels.measure(ceilings):
        figure = report.tried(measure)
        if figure is None:
            table.add_row("failed, see above")
            continue
        peers = [
            NOT_MEASURED if peer_s is None else f"{figure.seconds / peer_s:.2f}"
            for peer_s in (figure.sdpa_s, figure.flex_s)
        ]
        table.add_row(figure.name, f"{1e3 * figure.seconds:.3f}", _percent(figure.floor_s / figure.seconds), *peers)
    report.show(table)


def show_sweep(report: Report) -> None:
    """Print other tiles, the fastest first."""
    table = report.table("other tiles", "tile", "ms")
    for name, seconds in sorted(gpu_kernels.sweep(), key=lambda row: (row[0].partition("(")[0], row[1])):
        table.add_row(name, f"{1e3 * seconds:.3f}")
    report.show(table)


def show_model(report: Report, ceilings: Ceilings, name: str, *, profile: bool) -> None:
    """Build one model, measure and print it."""
    bench = report.tried(lambda: gpu_models.ModelBench(name, ceilings))
    if bench is None:
        return
    recorded = "decode steps recorded" if bench.runner.has_recordings else "decode steps NOT recorded"
    table = report.table(
        f"{name}, random bfloat16 weights, {recorded}", "step", "ms", "floor ms", "x floor", "tokens/s"
    )
    runs: list[Callable[[], gpu_models.StepFigure]] = [
        *(lambda shape=shape: bench.decode(*shape) for shape in gpu_models.DECODES),
        *(lambda length=length: bench.prefill(length) for length in gpu_models.PREFILLS),
    ]
    for run in runs:
        figure = report.tried(run)
        if figure is None:
            table.add_row("failed, see above")
            continue
        table.add_row(
            figure.name,
            f"{1e3 * figure.seconds:.2f}",
            f"{1e3 * figure.floor_s:.2f}",
            f"{figure.seconds / figure.floor_s:.2f}",
            f"{figure.tokens / figure.seconds:.0f}",
        )
    report.show(table)
    if profile:
        report.tried(lambda: _profile(report, bench))


def _profile(report: Report, bench: gpu_models.ModelBench) -> None:
    for name, run in (
        ("decode 64 x 2000", lambda: bench.decode(64, 2000)),
        ("prefill 8000", lambda: bench.prefill(8000)),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
        report.say(name)
        report.say(
            profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60)
        )


def show_handover(report: Report) -> None:
    """Measure and print hand-overs between two processes on this GPU."""
    table = report.table("hand-over of a prompt between two processes, Llama-3-8B, medians", "what", "ms", "GB/s")
    for row in report.tried(_measure_handover) or ():
        table.add_row(
            row.name, f"{1e3 * row.seconds:.2f}", f"{row.num_bytes / row.seconds / 1e9:.2f}" if row.num_bytes else ""
        )
    report.show(table)


def _measure_handover() -> "list[HandoverFigure]":
    from benchmarks import gpu_handover  # loads gRPC, which the other parts do without

    return gpu_handover.measure()


def show_serving(report: Report, name: str, config: PretrainedConfig, load: gpu_serving.Load) -> None:
    """Serve a model with random weights, and print what its clients saw."""
    table = report.table(
        f"{name} on one {load.device}, 1P+1D: prompts of {load.prompt_tokens} tokens, {load.num_streams} streams",
        *("ahead", "TTFT ms", "ITL ms", f"ITL ms x {load.num_streams}", "tokens/s", "hand-over ms", "control", "bytes"),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = report.tried(lambda: gpu_serving.write_random(Path(folder), config, load.dtype, load.device))
        for mode in ("off", "on") if model is not None else ():
            served = report.tried(lambda mode=mode: gpu_serving.measure(model, replace(load, async_scheduling=mode)))
            table.add_row(mode, *(("failed, see above",) if served is None else _serving_cells(served)))
    report.show(table)


def _serving_cells(served: gpu_serving.Served) -> list[str]:
    times = [served.ttft_s, served.itl_s, served.batch_itl_s]
    handover = [served.handover_s, served.control_s, served.handover_s - served.control_s]
    return [*map(_ms, times), f"{served.tokens_per_s:.0f}", *map(_ms, handover)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def show_nothing(report: Report) -> None:
    """Print what would be measured where there is a GPU."""
    table = report.table("no CUDA device here", "goal", "figure")
    for goal in GOALS:
        table.add_row(f"{goal.row}: {goal.text}", NOT_MEASURED)
    report.show(table)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=gpu_models.CONFIGS, default=list(gpu_models.CONFIGS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    report = Report()
    if args.dry_run:
        show_serving(report, "tiny", gpu_serving.TINY, gpu_serving.TINY_LOAD)
        return
    if not torch.cuda.is_available():
        show_nothing(report)
        return
    ceilings = measure_ceilings()
    report.say(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bfloat16 products {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    if "kernels" in args.only:
        show_kernels(report, ceilings)
    if args.sweep:
        show_sweep(report)
    if "models" in args.only:
        for name in args.models:
            show_model(report, ceilings, name, profile=args.profile)
    if "handover" in args.only:
        show_handover(report)
    if "serving" in args.only:
        show_serving(report, "Llama-3-8B", gpu_models.CONFIGS["Llama-3-8B"], gpu_serving.GPU_LOAD)


if __name__ == "__main__":
    main()
