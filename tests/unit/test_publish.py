"""benchmarks/publish.py: the parts of each side at a few numbers, the table, the command line. Ray is not needed."""

import threading
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from benchmarks import publish
from benchmarks.publish import BareReceiver, BareSender, Job, Publisher, Receiver, Seconds
from benchmarks.sleeping import BULK_CHUNK

TIMES = {
    "ours": [Seconds(make=1.0, load=2.0), Seconds(make=2.0, load=4.0), Seconds(make=1.0, load=3.0)],
    "bare Ray": [Seconds(make=0.5, load=1.5)] * 3,
    "shared memory": [Seconds(make=0.1, load=1.5)] * 3,
}


def test_our_workers_prove_each_version_that_the_publisher_gives_out() -> None:
    publisher, worker = Publisher(9), Receiver(*publish.make_worker_arguments(9))
    seen: set[str] = set()
    for version in (1, 2):
        (given, checksum), arrays = publisher.weights()
        report = worker.load_arrays(given, arrays)
        assert (report.version, report.checksum) == (version, checksum)
        seen.add(checksum)
    assert len(seen) == 2, "an old version could pass for a new one"


def test_bare_receivers_hold_what_was_sent_and_say_so() -> None:
    numel = BULK_CHUNK + 3
    sender, receivers = BareSender(numel), [BareReceiver(numel) for _ in range(2)]
    weights = sender.make()
    first = [receiver.load(weights) for receiver in receivers]
    publish.agree(first)
    assert [tensor.numel() for tensor in receivers[0].tensors] == [BULK_CHUNK, 3]
    held = np.concatenate([tensor.numpy() for tensor in receivers[0].tensors])
    np.testing.assert_array_equal(held, weights)
    with pytest.raises(RuntimeError, match="checksums differ"):
        publish.agree([first[0], receivers[1].load(sender.make())])


def test_a_process_serves_until_told_to_stop() -> None:
    shared = np.arange(5, dtype=np.float32)
    end, other = Pipe()
    server = threading.Thread(target=publish.serve, args=(shared, 5, other))
    server.start()
    assert end.recv() == "ready"
    end.send(True)
    assert end.recv() == BareReceiver(5).load(shared)
    end.send(False)
    server.join(timeout=10)
    assert not server.is_alive()


def test_the_page_says_what_was_measured() -> None:
    assert publish.ratios(TIMES) == {"bare Ray": 2.0, "shared memory": 2.5}
    command = ["python", "-m", "benchmarks.publish", "a b"]
    text = publish.document(TIMES, Job(numel=2**28, workers=4), command)
    assert "Publishing 1 GB to 4 workers" in text
    assert "**2.00** times" in text
    assert "| ours | 1.00 | 3.00 | 4.00 | 3.00, 6.00, 4.00 |  |" in text
    assert "| shared memory | 0.10 | 1.50 | 1.60 | 1.60, 1.60, 1.60 | 2.50 |" in text
    assert "benchmarks.publish 'a b'" in text
    assert "pickling" not in text


def test_sides_take_turns_and_a_repeat_counts_as_its_middle_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def side(name: str) -> publish.Side:
        def run(job: Job) -> list[Seconds]:
            order.append(name)
            return [Seconds(make=make, load=0.0) for make in (9.0, 1.0, 2.0)]

        return run

    monkeypatch.setattr(publish, "SIDES", {name: side(name) for name in TIMES})
    times = publish.measure(Job(numel=1, workers=1), repeats=2)
    assert order == [*TIMES, *TIMES]
    assert {one.total for each in times.values() for one in each} == {2.0}


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = publish.parse([])
    assert (args.gb, args.workers, args.repeats) == (1.0, 4, 3)
    args = publish.parse(["--gb", "0.01", "--workers", "2", "--docs", "docs"])
    assert (args.gb, args.workers, args.docs) == (0.01, 2, Path("docs"))
    for bad in (["--gb", "0"], ["--gb", "nan"], ["--workers", "0"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            publish.parse(bad)
        assert "--gb must be in" in capsys.readouterr().err
