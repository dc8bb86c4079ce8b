"""One thread, in order, that may be left behind."""

import threading

import pytest

from rewards.compute_thread import ComputeThread


def test_functions_run_in_order_in_one_thread() -> None:
    thread = ComputeThread[int]("compute")
    ran: list[tuple[int, str]] = []

    def work(i: int) -> int:
        ran.append((i, threading.current_thread().name))
        return i * i

    futures = [thread.submit(lambda i=i: work(i)) for i in range(10)]
    thread.close()
    assert [future.result(timeout=10) for future in futures] == [i * i for i in range(10)]
    assert ran == [(i, "compute") for i in range(10)]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_exception_travels_in_the_future_and_the_thread_goes_on(
    error: type[BaseException],
) -> None:
    def fail() -> int:
        raise error("from the thread")

    thread = ComputeThread[int]("compute")
    failed, fine = thread.submit(fail), thread.submit(lambda: 1)
    thread.close()
    with pytest.raises(error, match="from the thread"):
        failed.result(timeout=10)
    assert fine.result(timeout=10) == 1


def test_a_function_cancelled_before_its_turn_never_runs() -> None:
    entered, release = threading.Event(), threading.Event()
    ran: list[str] = []

    def block() -> None:
        entered.set()
        release.wait()

    thread = ComputeThread[None]("compute")
    blocking = thread.submit(block)
    entered.wait(timeout=10)
    waiting = thread.submit(lambda: ran.append("waiting"))
    last = thread.submit(lambda: ran.append("last"))
    assert waiting.cancel()
    thread.close()
    release.set()
    blocking.result(timeout=10)
    last.result(timeout=10)
    assert ran == ["last"]
