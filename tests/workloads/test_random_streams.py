"""The random streams of a process belong to one thread at a time, or to one gang."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dagsel.workloads.random_streams import (
    own_streams,
    preserved_streams,
    read_streams,
    seed_streams,
    write_streams,
)


def draws(seed: int, begin: threading.Barrier) -> list[float]:
    begin.wait(30)
    with preserved_streams():
        seed_streams(seed)
        return [random.random() + float(np.random.random()) for _ in range(2000)]


def test_threads_that_draw_at_once_draw_what_each_would_alone() -> None:
    alone = [draws(seed, threading.Barrier(1)) for seed in range(6)]
    begin = threading.Barrier(6)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda seed: draws(seed, begin), range(6))) == alone


def test_a_thread_may_enter_again_and_then_others_may() -> None:
    entered = threading.Event()

    def other() -> None:
        with own_streams():
            entered.set()

    with own_streams():
        with preserved_streams(), own_streams():
            thread = threading.Thread(target=other)
            thread.start()
        assert not entered.is_set()
    thread.join(30)
    assert entered.is_set()


def test_the_threads_of_a_gang_are_in_together_and_others_wait_for_all_of_them() -> None:
    together, order = threading.Barrier(3), list[str]()

    def rank() -> None:
        with preserved_streams(gang="a"):
            together.wait(30)
            together.wait(30)
            order.append("rank")

    def other() -> None:
        with own_streams():
            order.append("other")

    ranks = [threading.Thread(target=rank) for _ in range(2)]
    for thread in ranks:
        thread.start()
    together.wait(30)
    third = threading.Thread(target=other)
    third.start()
    together.wait(30)
    for thread in (*ranks, third):
        thread.join(30)
    assert order == ["rank", "rank", "other"]


def test_who_gives_up_waiting_does_not_get_them_and_holds_up_nobody() -> None:
    stop, waits, got = threading.Event(), threading.Event(), list[bool]()

    def asked() -> bool:
        waits.set()
        return stop.is_set()

    def impatient() -> None:
        with own_streams(give_up=asked) as mine:
            got.append(mine)

    def patient() -> None:
        with own_streams() as mine:
            got.append(mine)

    with own_streams():
        first = threading.Thread(target=impatient)
        first.start()
        assert waits.wait(30)
        second = threading.Thread(target=patient)
        second.start()
        stop.set()
        first.join(30)
        assert got == [False]
    second.join(30)
    assert got == [False, True]


def test_an_error_gives_them_back() -> None:
    def get() -> bool:
        with own_streams() as mine:
            return mine

    with pytest.raises(KeyError), preserved_streams():
        raise KeyError
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(get).result(30)


READING = """
import gc, threading, torch
from dagsel.workloads.random_streams import read_streams

def read():
    for _ in range(1500):
        rubbish = [torch.zeros(3) for _ in range(20)]
        rubbish.append(rubbish)
        del rubbish
        read_streams("cpu")

gc.set_threshold(1)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_ranks_of_a_gang_read_them_at_once_and_do_not_stop_each_other() -> None:
    # In a process of its own: threads that wait for each other inside PyTorch end with it alone.
    subprocess.run([sys.executable, "-c", READING], timeout=120, check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_stream_of_a_gpu_is_not_kept_where_there_is_none() -> None:
    """PyTorch keeps what is to be done once there is one, and each unit here would add to it."""
    streams = {**read_streams("cpu"), "cuda": torch.zeros(16, dtype=torch.uint8)}
    n_before = len(torch.cuda._queued_calls)
    write_streams(streams)
    assert len(torch.cuda._queued_calls) == n_before
