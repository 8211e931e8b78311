"""Takes of large values keep their memory for the next take, and return it when takes have ended. What is counted are page faults."""

import measured
import numpy as np
import penstock as ps
import pytest

SAMPLES, SAMPLE_BYTES = 300, 80_000

# Without imports that free large blocks: after one of 16 MB, glibc returns nothing anyway.
TAKES = """
import gc, resource, sys, threading
import numpy as np, penstock as ps
from measured import anonymous
from waiting import until
ds = ps.open(sys.argv[1])
view = memoryview(b"".join([b"x" * 80_000] * 8))
groups = [np.random.default_rng(seed).permutation(len(ds))[:128] for seed in range(10)]

def faults(work):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for group in groups:
        work(group)
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / len(groups)

def take(group):
    ds.take(group, columns=["blob"], decode=False)

def copy(group):
    [bytes(view[80_000 * (place % 8) : 80_000 * (place % 8 + 1)]) for place in group.tolist()]

faults(take)
before = faults(copy), anonymous()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    random = np.random.default_rng(0)
    ds = ps.create(tmp_path_factory.mktemp("takes") / "dataset", {"blob": ps.Bytes()})
    ds.append({"blob": [random.bytes(SAMPLE_BYTES) for _ in range(SAMPLES)]})
    return ds.uri


def run(program, place):
    return [float(number) for number in measured.run(TAKES + program, place).split()]


def test_takes_of_bytes_do_not_fault_their_memory_in_again(place):
    (faults,) = run("print(faults(take))", place)
    assert faults <= 0.05 * 128 * SAMPLE_BYTES / 4096, faults


def test_takes_that_are_kept_until_the_next_one_do_not_either(place):
    program = """
kept = []
def hold(group):
    kept[:] = [ds.take(group, columns=["blob"])]
faults(hold)
print(faults(hold))
"""
    (faults,) = run(program, place)
    assert faults <= 0.05 * 128 * SAMPLE_BYTES / 4096, faults


def test_copies_of_the_user_fault_no_more_after_takes_in_two_threads(place):
    program = """
threads = [threading.Thread(target=lambda: [faults(take) for _ in range(3)]) for _ in range(2)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(before[0], faults(copy))
"""
    before, after = run(program, place)
    assert after <= before + 0.05 * 128 * SAMPLE_BYTES / 4096, (before, after)


def test_the_memory_of_takes_returns_when_they_have_ended(place):
    program = """
[faults(take) for _ in range(3)]
kept = ds.take(groups[0], columns=["blob"], decode=False)
during = anonymous()
# On a slow machine, the memory may return as soon as the objects are freed.
del kept
until(lambda: anonymous() <= during - 6 * (1 << 20), "the memory of a take")
print(during, anonymous())
"""
    during, after = run(program, place)
    assert during - after >= 6 << 20


def test_a_forked_process_takes_as_well(place):
    program = """
import os
[faults(take) for _ in range(2)]
child = os.fork()
if child == 0:
    faults(take)
    os._exit(int(faults(take) > 200))
print(os.waitpid(child, 0)[1])
"""
    assert run(program, place) == [0]
