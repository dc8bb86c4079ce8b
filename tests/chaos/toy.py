"""A run without Ray, torch or mathematics, but with processes that can be killed: what the killer is tried on.

    python -m tests.chaos.toy FOLDER MARKS ITERATIONS [forgets]

A driver with two workers, a server and a rank as child processes; it goes through the phases of an iteration one
after the other, asks another child when one is gone, and goes back to its last checkpoint when the rank is. With
`forgets` it goes back one iteration too few: a loss that the ledger must find.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.chaos.marks import linger

LENGTH_S = 0.05
GROUPS_PER_BATCH = 4
PARTS = ("worker", "replica", "rank")


class RankLost(Exception):
    """The rank is gone, and what it knew."""


class Child:
    """One part: it lingers when it is told to, and answers."""

    def __init__(self, kind: str, marks: Path):
        words = [sys.executable, "-m", "tests.chaos.toy", kind, str(marks)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def does(self, phase: str) -> bool:
        """Whether the child did it; False when it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(phase + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return self.process.stdout.readline() == phase + "\n"


class Driver:
    """The run."""

    def __init__(self, folder: Path, marks: Path, num_iterations: int, forgets: bool):
        self.folder, self.marks, self.num_iterations = folder, marks, num_iterations
        self.forgets = forgets
        self.parts = {
            "worker": [self._child("worker"), self._child("worker")],
            "replica": [self._child("replica")],
            "rank": [self._child("rank")],
        }

    def _child(self, kind: str) -> Child:
        return Child(kind, self.marks)

    def run(self) -> None:
        """Train to the end."""
        done = self._last_checkpoint()
        incarnation = done
        while done < self.num_iterations:
            try:
                self._iterate(done, incarnation)
                done += 1
            except RankLost:
                self.parts["rank"] = [self._child("rank")]
                done = self._last_checkpoint()
                incarnation += 1

    def _last_checkpoint(self) -> int:
        found = [int(p.name.removeprefix("step_")) for p in self.folder.glob("checkpoints/step_*")]
        last = max(found, default=0)
        return last + (self.forgets and last > 0)

    def _iterate(self, done: int, incarnation: int) -> None:
        self._ask("worker", "sample")
        self._ask("replica", "score")
        linger(self.marks, "seal", LENGTH_S)
        self._ask("rank", "train")
        self._ask("rank", "publish")
        first = done * GROUPS_PER_BATCH
        row = {
            "iteration": done + 1,
            "incarnation": incarnation,
            "group_ids": list(range(first, first + GROUPS_PER_BATCH)),
            "policy_version": done,
            **dict.fromkeys(("counts", "reward", "loss", "grad_norm"), done),
            "format_version": 1,
        }
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._ask("rank", "checkpoint")
        (self.folder / "checkpoints" / f"step_{done + 1:06d}").mkdir(parents=True, exist_ok=True)

    def _ask(self, kind: str, phase: str) -> None:
        """Have a part do it; other ones when it is gone. RankLost when the rank is."""
        children = self.parts[kind]
        while not children[0].does(phase):
            if kind == "rank":
                raise RankLost
            children[0] = self._child(kind)
        children.append(children.pop(0))


def obey(marks: Path) -> None:
    """Be a child."""
    for line in sys.stdin:
        linger(marks, line.strip(), LENGTH_S)
        print(line.strip(), flush=True)


def main(words: list[str]) -> None:
    """Be the driver, or a child."""
    if words[0] in PARTS:
        obey(Path(words[1]))
    else:
        folder = Path(words[0])
        folder.mkdir(exist_ok=True)
        Driver(folder, Path(words[1]), int(words[2]), "forgets" in words).run()


if __name__ == "__main__":
    main(sys.argv[1:])
