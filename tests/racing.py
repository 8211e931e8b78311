"""Several processes create a dataset at one place at the same moment."""

import json

import measured
import penstock as ps

RACE = """
import json, multiprocessing, os, sys
import penstock as ps

def create_together(place, barrier, answers):
    barrier.wait()
    try:
        ps.create(place, {"n": "int32"}).append({"n": [os.getpid()]})
        answers.put("made")
    except ps.Error as error:
        answers.put(error.code if error.code == "dataset-exists" else str(error))

context, racers = multiprocessing.get_context("fork"), int(sys.argv[1])
for place in sys.argv[2:]:
    barrier, answers = context.Barrier(racers), context.SimpleQueue()
    processes = [context.Process(target=create_together, args=(place, barrier, answers)) for _ in range(racers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(json.dumps(sorted(answers.get() for _ in range(racers))))
"""


def race_to_create(places, racers=2):
    """Create a dataset at each place from several processes at once. Exactly one process succeeds; the others report `dataset-exists`.

    The racers are forks of a small process, because a fork of the process that runs all tests takes long.
    """
    answers = measured.run(RACE, racers, *places).splitlines()
    for place, told in zip(places, map(json.loads, answers), strict=True):
        assert told == ["dataset-exists"] * (racers - 1) + ["made"], (place, told)
        ds = ps.open(place)
        assert len(ds) == 1 and not ds.verify()["problems"]
