"""Under a time limit all systems come to the same examples, which stand for the whole set, and no system is left out."""

import random
import statistics
from itertools import pairwise

import pytest

from hf_ensemble.evaluation import read_set
from hf_ensemble.evaluation.order import Examples, in_turns, one_by_one


def texts_of(count, seed=0):
    generator = random.Random(seed)
    return [{"text": "".join(generator.choices("abcdefgh", k=n))} for n in range(20, 20 + count)]


def examples_of(count, seed=0, work="score"):
    return Examples(read_set(texts_of(count, seed), name="set"), work)


def lengths(examples, batch):
    return [len(examples.items[key].continuations[0]) for key in batch]


@pytest.mark.parametrize(("count", "size"), [(1, 8), (7, 1), (20, 8), (64, 8), (65, 8), (99, 12)])
@pytest.mark.parametrize("order", ["drawn", "longest_first"])
def test_every_example_is_in_one_batch(order, count, size):
    examples = examples_of(count)
    batches = list(getattr(examples, order)(examples.items, size))
    assert sorted(key for batch in batches for key in batch) == sorted(examples.keys)
    assert all(0 < len(batch) <= size for batch in batches)


def test_the_longest_are_first_without_a_limit():
    examples = examples_of(20)
    found = [n for batch in examples.longest_first(examples.items, 8) for n in lengths(examples, batch)]
    assert found == sorted(found, reverse=True)


def test_the_draw_depends_on_the_examples_alone():
    """Not on their order, what has run of them, or the work."""
    records = texts_of(40)
    one, other = (Examples(read_set(own, name="set"), "score") for own in (records, records[::-1]))
    batches = list(one.drawn(one.items, 8))
    assert batches == list(other.drawn(other.items, 8))
    left = [key for key in one.items if key not in batches[0]]
    assert set(next(iter(one.drawn(left, 8)))) <= {key for batch in batches[1:3] for key in batch}
    questions = read_set([{"question": text["text"], "answer": "x"} for text in records], name="set")
    write, score = (Examples(questions, work) for work in ("write", "score"))
    drawn = [[own.items[key] for batch in own.drawn(own.items, 8) for key in batch] for own in (write, score)]
    assert drawn[0][:7] == drawn[1][:7]  # of the first batches; later ones are sorted by what is read
    assert set(drawn[0]) == set(drawn[1])


def test_the_first_batches_stand_for_all():
    """The mean length of the first, third, … is that of the set: of 400 draws within 4 standard errors."""
    means = {1: [], 3: [], 4: [], 5: [], 7: []}
    for seed in range(400):
        examples = examples_of(60, seed)
        batches = list(examples.drawn(examples.items, 8))
        for number, of_batch in means.items():
            of_batch.append(statistics.mean(lengths(examples, batches[:number][-1])))
    for number, of_batch in means.items():
        error = statistics.stdev(of_batch) / 20
        assert abs(statistics.mean(of_batch) - statistics.mean(range(20, 80))) < 4 * error, number


def test_batches_begin_small_and_then_are_of_about_equal_lengths():
    examples = examples_of(143)
    batches = list(examples.drawn(examples.items, 8))
    assert [len(batch) for batch in batches[:4]] == [1, 2, 4, 8]
    spreads = [max(own) - min(own) for own in (lengths(examples, batch) for batch in batches[3:])]
    assert statistics.mean(spreads) < 0.35 * 142
    assert list(map(len, batches[3:])) == [8] * 17


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("hf_ensemble.evaluation.order.time.perf_counter", lambda: self.now)


class FakeTask:
    """Takes some seconds for an example and some for a batch."""

    def __init__(self, examples, clock, each=1.0, batch=0.0, done=()):
        self.examples, self.clock, self.each, self.batch = examples, clock, each, batch
        keys = [key for key in examples.items if key not in done]
        self.batches = list(examples.drawn(keys, 8))
        self.num_left, self.last, self.ran, self.seconds = len(keys), None, [], 0.0

    def next_batch(self):
        return self.batches[0] if self.batches else []

    def run(self):
        keys = self.batches.pop(0)
        seconds = self.batch + self.each * len(keys)
        self.clock.now += seconds
        self.seconds += seconds
        self.num_left -= len(keys)
        self.last = seconds, len(keys)
        self.ran += keys


def run(tasks, limit):
    turns = []
    for task in in_turns(tasks, limit):
        task.run()
        turns.append(tasks.index(task))
    return turns


@pytest.mark.parametrize("limit", [10, 30, 100, 300, 1000, 1e9])
def test_tasks_of_any_speed_come_to_the_same_examples(limit, monkeypatch):
    clock = Clock(monkeypatch)
    examples = examples_of(150)
    tasks = [FakeTask(examples, clock, each, batch) for each, batch in ((0.1, 1), (0.5, 0), (1, 2), (0, 2))]
    began = clock.now
    run(tasks, limit)
    assert clock.now - began <= limit
    assert all(task.ran for task in tasks)
    fewest = min((task.ran for task in tasks), key=len)
    for task in tasks:
        assert task.ran[: len(fewest)] == fewest
        assert len(task.ran) - len(fewest) <= 8
        assert limit < 1e9 or len(task.ran) == 150


def test_a_limit_is_used_up_to_about_a_batch_of_each(monkeypatch):
    clock = Clock(monkeypatch)
    examples = examples_of(400)
    tasks = [FakeTask(examples, clock, 1.0) for _ in range(3)]
    began = clock.now
    turns = run(tasks, 600)
    assert 600 - 3 * 8 <= clock.now - began <= 600
    assert sum(a != b for a, b in pairwise(turns)) < len(turns) / 2  # turns of several batches


def test_time_is_shared_evenly_between_sets(monkeypatch):
    clock = Clock(monkeypatch)
    slow, quick = examples_of(100), examples_of(100, 1)
    tasks = [
        FakeTask(slow, clock, 5.0),
        FakeTask(slow, clock, 5.0),
        FakeTask(quick, clock, 0.5),
        FakeTask(quick, clock),
    ]
    run(tasks, 240)
    spent = [tasks[0].seconds + tasks[1].seconds, tasks[2].seconds + tasks[3].seconds]
    assert max(spent) - min(spent) <= 2 * 8 * 5
    assert all(task.ran for task in tasks)
    # What one set does not need, the other has.
    small = examples_of(3, 2)
    tasks = [FakeTask(small, clock), FakeTask(quick, clock)]
    run(tasks, 80)
    assert tasks[0].num_left == 0
    assert len(tasks[1].ran) > 60


def test_who_is_behind_catches_up(monkeypatch):
    clock = Clock(monkeypatch)
    examples = examples_of(100)
    first = FakeTask(examples, clock)
    run([first], 30)
    tasks = [FakeTask(examples, clock, done=first.ran), FakeTask(examples, clock)]
    run(tasks, 60)
    assert abs(len(first.ran) + len(tasks[0].ran) - len(tasks[1].ran)) <= 8


def test_nothing_begins_after_the_limit(monkeypatch):
    clock = Clock(monkeypatch)
    tasks = [FakeTask(examples_of(5), clock, 100.0)]
    run(tasks, 1)
    assert len(tasks[0].ran) == 1  # nobody knew how long it takes
    assert run(tasks, 50) == []


def test_one_by_one_each_is_through_before_the_next(monkeypatch):
    clock = Clock(monkeypatch)
    examples = examples_of(20)
    tasks = [FakeTask(examples, clock) for _ in range(2)]
    turns = []
    for task in one_by_one(tasks):
        task.run()
        turns.append(tasks.index(task))
    assert turns == sorted(turns)
    assert not any(task.num_left for task in tasks)
