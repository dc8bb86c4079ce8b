"""What a person sees while a run goes on: a bar in a terminal, a plain line per iteration elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows phases, notes and iterations. Use as a context manager around the run."""

    def __init__(self, num_iterations: int, console: Console | None = None):
        self.console = console or Console(soft_wrap=True)
        self._num_iterations = num_iterations
        self._started = time.monotonic()
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_iterations, facts="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Say what the run does now."""
        text = name.replace("_", " ")
        self._bar.update(self._task, description=text)
        self.note(text)

    def note(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(
            f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]  {escape(text)}", highlight=False
        )

    def iteration(self, row: dict[str, Any]) -> None:
        """Show one finished iteration (a row of metrics.jsonl)."""
        facts = f"reward {row['reward']['mean']:.4f}  {row['images_per_s']:.1f} images/s"
        self._bar.update(self._task, completed=row["iteration"], facts=facts)
        if not self.console.is_terminal:
            seconds = row["seconds"]
            left_s = (self._num_iterations - row["iteration"]) * seconds["total"]
            self.note(
                f"iteration {row['iteration']}/{self._num_iterations}  {facts}  "
                f"rollout {seconds['rollout']:.1f} s  learn {seconds['learn']:.1f} s  "
                f"grad norm {row['grad_norm']:.3g}  clipped {row['clipped_frac']:.2f}  about {left_s:.0f} s left"
            )
