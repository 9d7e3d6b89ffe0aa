"""Random schedules and costs, and a second simulator that shares no code with the library's: it ticks, second by second."""

from collections import deque

from hypothesis import strategies as st

from diffrl.parallel import CostModel, Fragment, Pool, Schedule, TrainCost, gap_partition, prompt_partition


@st.composite
def fragments_of(draw, n_prompts: int, group_size: int, *, most: int = 6):
    """A partition along the sample axis, in whole groups, or of shuffled rows (every group may be cut anywhere)."""
    n = n_prompts * group_size
    how = draw(st.sampled_from(["gap", "gap", "prompt", "shuffled"]))
    if how == "prompt":
        return prompt_partition(n_prompts, group_size, fragments=draw(st.integers(1, min(most, n_prompts))))
    cut = gap_partition(n_prompts, group_size, fragments=draw(st.integers(1, min(most, n))))
    if how == "gap":
        return cut
    rows = draw(st.permutations(range(n)))
    return tuple(Fragment(f.index, tuple(rows[i] for i in f.samples)) for f in cut)


@st.composite
def schedules(draw, *, most: int = 6, **given):
    """Split schedules; what is given is kept."""
    g, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    fragments = draw(fragments_of(g, k, most=most))
    drawn = {
        "timesteps": draw(st.integers(1, 3)),
        "pack": draw(st.integers(1, 3)),
        "shard_pairs": draw(st.booleans()),
        "barrier": draw(st.integers(0, 4)) == 0,
        "tag": draw(st.booleans()),
        "stale": draw(st.integers(0, len(fragments))),
    }
    return Schedule(fragments, k, **{**drawn, **given})


@st.composite
def costs(draw, *, most: int = 12, **given):
    """Whole seconds, so that ties are ties; a helper always."""
    trainer = Pool(draw(st.integers(1, 3)))
    drawn = {
        "generate": float(draw(st.integers(1, most))),
        "train": TrainCost(float(draw(st.integers(0, 3))), float(draw(st.integers(1, 5)))),
        "generator": Pool(draw(st.integers(1, 3))),
        "trainer": trainer,
        "helper": draw(st.integers(1, trainer.gpus)),
        "reward": float(draw(st.integers(0, most))),
        "reward_per_sample": float(draw(st.integers(0, 2))),
        "reward_workers": draw(st.sampled_from([None, 1, 2])),
        "optimizer": float(draw(st.integers(0, 4))),
        "publish": float(draw(st.integers(0, 4))),
        "switch": float(draw(st.integers(0, 3))),
        "restore": float(draw(st.integers(0, 3))),
    }
    return CostModel(**{**drawn, **given})


class Ticking:
    """The rules of a split schedule, looked at every second until nothing more happens in it. Durations are whole.

    lend(unclaimed) -> n is asked in bubbles. After the end: ends, versions, trained [(start, step, fragment)].
    """

    def __init__(self, schedule, cost, *, steps=1, lend=None):
        self.schedule, self.cost, self.steps, self.lend = schedule, cost, steps, lend
        self.count = len(schedule.fragments)
        self.groups = [{row // schedule.group_size for row in f.samples} for f in schedule.fragments]
        self.queue = [(step, i) for step in range(steps) for i in range(self.count)]
        self.waiting, self.busy, self.jobs = deque(), [], deque()
        self.scored, self.versions, self.trained, self.ends, self.asked = {}, {}, [], [], False
        self.generator = self.trainer = None
        self.now = self.published = 0
        while len(self.ends) < steps:
            while self.complete() or self.claim() or (len(self.ends) < steps and self.work()):
                pass
            self.now += 1
            assert self.now < 100_000, "it stands still"

    def size(self, item):
        return len(self.schedule.fragments[item[1]].samples)

    def complete(self):
        before = (self.generator, self.trainer, len(self.waiting), len(self.busy))
        if self.generator and self.generator[0] <= self.now:
            self.waiting.append(self.generator[1])
            self.generator = None
        if self.trainer and self.trainer[0] <= self.now:
            _, kind, item = self.trainer
            self.trainer = None
            if kind == "help":
                self.waiting.append(item)
            elif kind == "train":
                self.asked = False
            elif kind == "publish":
                self.ends.append(self.now)
                self.published += 1
        for job in [job for job in self.busy if job[0] <= self.now]:
            self.scored[job[1]] = job[0]
            self.busy.remove(job)
        while self.waiting and (self.cost.reward_workers is None or len(self.busy) < self.cost.reward_workers):
            item = self.waiting.popleft()
            seconds = self.cost.reward + self.cost.reward_per_sample * self.size(item)
            self.busy.append((self.now + seconds, item))
        return before != (self.generator, self.trainer, len(self.waiting), len(self.busy)) or any(
            job[0] <= self.now for job in self.busy
        )

    def claim(self):
        if self.generator or not self.queue:
            return False
        step, i = self.queue[0]
        if step != self.published and not (step == self.published + 1 and i < self.schedule.stale):
            return False
        self.versions[self.queue.pop(0)] = self.published
        waves = -(-self.size((step, i)) // self.cost.generator.replicas)
        self.generator = (self.now + waves * self.cost.generate, (step, i))
        return True

    def ready(self, i):
        """When fragment i of the current step became trainable, None before."""
        whole = self.schedule.barrier
        partners = [j for j in range(self.count) if whole or self.groups[i] & self.groups[j]]
        times = [self.scored.get((self.published, j)) for j in partners]
        return None if None in times else max(times)

    def work(self):
        if self.trainer:
            return False
        if not self.jobs:
            self.decide()
        if not self.jobs:
            return False
        kind, seconds, item = self.jobs.popleft()
        self.trainer = (self.now + seconds, kind, item)
        if kind == "train":
            self.trained.append((self.now, *item))
        return True

    def decide(self):
        done = {i for _, step, i in self.trained if step == self.published}
        if len(done) == self.count:
            self.jobs.extend([("update", self.cost.optimizer, None), ("publish", self.cost.publish, None)])
            return
        ready = [(self.ready(i), i) for i in range(self.count) if i not in done and self.ready(i) is not None]
        if ready:
            item = (self.published, min(ready)[1])
            ranks, n, s = self.cost.trainer.replicas, self.size(item), self.schedule
            q = -(-n * s.timesteps // ranks) if s.shard_pairs else -(-n // ranks) * s.timesteps
            self.jobs.append(("train", -(-q // s.pack) * self.cost.train.a + q * self.cost.train.b, item))
            return
        mine = [item for item in self.queue if item[0] == self.published]
        if not self.schedule.tag or self.asked or not mine:
            return
        n = self.lend(len(mine))
        self.asked = n == 0
        if n:
            self.jobs.append(("switch", self.cost.switch, None))
            for item in mine[:n]:
                self.queue.remove(item)
                self.versions[item] = self.published
                waves = -(-self.size(item) // (self.cost.trainer.gpus // self.cost.helper))
                self.jobs.append(("help", waves * self.cost.generate, item))
            self.jobs.append(("restore", self.cost.restore, None))
