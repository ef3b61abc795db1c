"""The index of the waiting jobs answers, however it came about, as one built anew."""

from __future__ import annotations

import re

from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from core.planning import NOW, S, job, machine, run, started, view
from core.worlds import BOX, NAMES, POLICIES, waiting
from spool.core.constraints import as_run
from spool.core.model import Dependencies, Grant, Policy, Running, State, Waiting
from spool.core.queue import Shape, WaitingQueue, shape_key
from spool.core.resources import Runs
from spool.core.scheduler import Plan, View, decide


def answer(view: View, now_ns: int, policy: Policy) -> tuple[object, ...]:
    """Return everything that a plan says."""
    plan = decide(view, now_ns, policy)
    reasons = {name: [str(each) for each in plan.all_reasons(name)] for name in (*view.queue, *view.held)}
    firsts = {name: str(plan.reason(name)) for name in (*view.queue, *view.held)}
    return plan.starts, set(plan.endings), plan.protected, plan.holding, plan.next_at_ns, reasons, firsts


FEW = [*NAMES[:3], "sweep_0", "sweep_1"]
FILES = st.sampled_from(FEW)
OUTCOMES = st.sampled_from([State.FINISHED, State.FAILED])
ARRAYS = {"sweep": ("sweep_0", "sweep_1")}


class Index(RuleBasedStateMachine):
    """Jobs come, change and go, start and end, time goes on and back: the kept index and a new one answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.held = {}
        self.running = {}
        self.ended = {}
        self.now_ns = NOW
        self.paused = False

    @initialize(policy=POLICIES)
    def begin(self, policy):
        """Draw the configuration."""
        self.policy = policy

    @rule(new=waiting(FEW))
    def put(self, new):
        """Bring or edit a file."""
        self.queue.put(new)
        self.held.pop(new.name, None)

    @rule(name=FILES)
    def remove(self, name):
        """Delete a file."""
        self.queue.remove(name)

    @rule(name=FILES)
    def hold_or_release(self, name):
        """Move a file to held/, or back."""
        if name in self.queue:
            self.held[name] = self.queue[name]
            self.queue.remove(name)
        elif name in self.held:
            self.queue.put(self.held.pop(name))

    @rule(name=FILES)
    def start(self, name):
        """Start a job."""
        if name in self.queue and name not in self.running:
            spec = self.queue[name].spec
            self.queue.remove(name)
            self.running[name] = Running(name, 1, "alice", spec, Grant(cpus=1), self.now_ns)

    @rule(name=FILES, outcome=st.one_of(st.none(), OUTCOMES))
    def end(self, name, outcome):
        """End a run, its outcome seen in the same look, or lose sight of it before that is known."""
        if self.running.pop(name, None) is not None and outcome is not None:
            self.ended[name] = outcome

    @rule(name=FILES, outcome=st.one_of(st.none(), OUTCOMES))
    def correct(self, name, outcome):
        """Change an outcome, or lose a record, which the owner tells."""
        self.ended.pop(name, None)
        if outcome is not None:
            self.ended[name] = outcome
        self.queue.changed(name)

    @rule(name=FILES, outcome=OUTCOMES)
    def learn(self, name, outcome):
        """Add an outcome late; the queue is told only that something may have changed."""
        if name not in self.ended:
            self.ended[name] = outcome
            self.queue.watch.look_again()

    @rule(by=st.sampled_from([1, 4, -3, 10**12]))
    def tick(self, by):
        """Let the clock go on, or set it back."""
        self.now_ns += by

    @rule()
    def pause(self):
        """Pause or resume the spool."""
        self.paused = not self.paused

    @rule()
    def perform(self):
        """Carry out the endings."""
        plan = decide(self.view(self.queue), self.now_ns, self.policy)
        for ending in plan.endings:
            self.queue.remove(ending.name)
            self.held.pop(ending.name, None)
            self.ended[ending.name] = ending.outcome

    def view(self, queue):
        """Return the view with that index."""
        return View(BOX, queue, self.held, Runs(self.running.values()), self.ended, ARRAYS, paused=self.paused)

    @invariant()
    def alike(self):
        """Compare the answers of the kept index and of one built anew, and ask twice."""
        if not hasattr(self, "policy"):
            return
        kept = answer(self.view(self.queue), self.now_ns, self.policy)
        anew = answer(self.view(WaitingQueue(self.queue.values())), self.now_ns, self.policy)
        assert kept == anew
        assert kept == answer(self.view(self.queue), self.now_ns, self.policy)
        assert len(self.queue) == sum(shape.members for shape in self.queue.shapes.values())


TestIndex = Index.TestCase
TestIndex.settings = settings(stateful_step_count=20)


@given(st.lists(waiting(), max_size=8), POLICIES, st.randoms(use_true_random=False))
def test_the_order_of_arrival_in_memory_decides_nothing(jobs, policy, random):
    """The same jobs put in another order make the same plan."""
    jobs = list({each.name: each for each in jobs}.values())
    other = list(jobs)
    random.shuffle(other)
    event(f"{len(jobs)} jobs")
    assert answer(View(BOX, WaitingQueue(jobs)), NOW, policy) == answer(View(BOX, WaitingQueue(other)), NOW, policy)


class Counting(WaitingQueue):
    """Remembers which jobs it was asked for."""

    def __init__(self, jobs):
        self.asked = []
        super().__init__(jobs)
        self.asked.clear()

    def __getitem__(self, name):
        self.asked.append(name)
        return super().__getitem__(name)


def test_it_is_a_mapping():
    """The queue is asked like a dictionary."""
    queue = WaitingQueue([job("a"), job("b", user="bob", project="p")])
    queue.put(job("a", priority=3))
    queue.remove("nobody")
    assert (len(queue), set(queue), "a" in queue, "x" in queue, queue.get("x")) == (2, {"a", "b"}, True, False, None)
    assert queue["a"].spec.priority == 3
    assert {key.user for key in queue.shapes} == {"alice", "bob"}


def test_what_matters_of_ended_jobs_is_told():
    """The names whose outcome anybody asks for are those that waiting jobs depend on."""
    queue = WaitingQueue([job("a", depends_on="x"), job("b", depends_on=("x", "y"))])
    assert set(queue.watch.names()) == {"x", "y"}
    queue.remove("b")
    assert set(queue.watch.names()) == {"x"}


def test_a_pass_asks_nothing_of_jobs_behind_the_first_of_their_shape():
    """Of 1,000 equal jobs of which none fits, the rules look at one at most."""
    queue = Counting(job(f"j{n:04}", cpus=2, waited=n) for n in range(1000))
    found = decide(View(machine(cpus=4), queue, running=Runs([run("r", cpus=3)])), NOW, Policy())
    assert (started(found), len(set(queue.asked)) <= 1) == ([], True)
    assert started(decide(View(machine(cpus=4), queue), NOW, Policy())) == ["j0999", "j0998"]
    assert len(set(queue.asked)) <= 4


def test_closed_gates_are_not_looked_at():
    """Jobs that wait for an instant, for another job or for both stand beside their shape; no pass looks at them."""
    both = {"start_after_ns": NOW + 5, "depends_on": "r"}
    shut = [{"start_after_ns": NOW + 5}, {"depends_on": "r"}, both, {"start_after_ns": NOW - 5, "depends_on": "r"}]
    queue = Counting(job(f"j{n:03}", waited=n + 1, **shut[n % 4]) for n in range(400))
    queue.put(job("j998"))

    def looked_at(now_ns):
        decide(View(machine(), queue, running=Runs([run("r")])), now_ns, Policy())  # what has changed is looked at once
        queue.asked.clear()
        found = decide(View(machine(), queue, running=Runs([run("r")])), now_ns, Policy())
        return started(found), len(set(queue.asked))

    assert looked_at(NOW) == (["j998"], 1)
    free = ["j396", "j392", "j388"]
    assert looked_at(NOW + 5) == (free, 4)
    assert looked_at(NOW) == (["j998"], 1)
    queue.put(job("j400", waited=500, start_after_ns=NOW + 1))
    assert looked_at(NOW) == (["j998"], 1)


def decisions(seen, *changes):
    """Return whether `j` starts after each change of the world, the queue told of none."""
    found = [bool(started(decide(seen, NOW, Policy())))]
    for change in changes:
        seen = change(seen)
        found.append(bool(started(decide(seen, NOW, Policy()))))
    return found


def test_a_held_job_that_is_released_without_what_it_waited_for_is_one_job():
    """Its file is edited in held/: it starts once, and once it has started its place is empty."""
    queue, waits = WaitingQueue(), job("a", depends_on="r")
    decide(View(machine(), queue, {"a": waits}, running=Runs([run("r")])), NOW, Policy())
    queue.put(job("a"))
    assert started(decide(View(machine(), queue, running=Runs([run("r")])), NOW, Policy())) == ["a"]
    queue.remove("a")
    queue.put(job("b"))
    assert started(decide(View(machine(), queue, running=Runs([run("r")])), NOW, Policy())) == ["b"]


def test_the_end_of_a_run_is_noticed():
    """Whoever depends on a run starts when it is seen no more and has finished; if it finishes later, at a look.

    `changed` without names has every dependency judged again, as a look has, also of an array whose task was unseen.
    """
    queue = WaitingQueue([job("j", depends_on="a")])
    seen = View(machine(), queue, running=Runs([run("a")]))
    gone = replace(seen, running=Runs())
    done = replace(gone, ended={"a": State.FINISHED})
    assert decisions(seen, lambda _: done) == [False, True]
    for tell in (queue.watch.look_again, queue.changed):
        queue.put(job("j", depends_on="a"))
        changes = (lambda _: gone, lambda _: done, lambda _, tell=tell: tell() or done)
        assert decisions(seen, *changes) == [False, False, False, True]
    queue = WaitingQueue([job("j", depends_on=Dependencies(ended=("s",)))])
    arrays = {"s": ("s_0", "s_1")}
    seen = View(machine(), queue, held={"s_0": job("s_0")}, arrays=arrays)
    late = {"s_0": State.FINISHED, "s_1": State.FINISHED}

    assert decisions(seen, lambda _: queue.watch.look_again() or replace(seen, held={}, ended=late)) == [False, True]


class Ended(dict):
    """How names have ended, and which of them anybody has asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = []

    def get(self, name, default=None):
        """Return how *name* has ended."""
        self.asked.append(name)
        return super().get(name, default)


def asked_for(view, *changed):
    """Return which names a pass asks for after the owner has told of these changes."""
    for name in changed:
        view.queue.changed(name)
    view.ended.asked.clear()
    plan = decide(view, NOW, Policy())
    for name in view.queue:
        plan.reason(name)
    return set(view.ended.asked)


def test_what_nobody_changed_is_not_judged_again():
    """A pass asks for nothing that waiting and held jobs depend on, but for what those wait for that were told of."""
    names = {at: tuple(f"{letter}{n}" for n in range(1000)) for at, letter in enumerate("abc")}
    queue = WaitingQueue([job("first", depends_on=names[0]), job("second", depends_on=names[1])])
    held = {"third": job("third", depends_on=names[2])}
    view = View(machine(), queue, held=held, ended=Ended())
    assert asked_for(view) == {*names[0], *names[1], *names[2]}
    assert asked_for(view) == set()
    queue.put(job("other"))
    assert asked_for(replace(view, running=Runs([run("unrelated")]))) == set()
    assert asked_for(view, "nobody") == set()
    assert asked_for(view, "b7") == set(names[1])
    assert asked_for(view, "c7") == set(names[2])
    assert asked_for(replace(view, running=Runs([run("a3")]))) == set(names[0]) - {"a3"}
    queue.watch.look_again()
    assert asked_for(replace(view, running=Runs([run("a3")]))) >= set(names[1])
    assert asked_for(replace(view, running=Runs([run("a3")]))) == set()


def test_of_an_array_the_tasks_that_changed_are_counted_anew():
    """Whoever waits for ten thousand tasks costs a pass no more than the ends that it has seen."""
    tasks = tuple(f"s_{n}" for n in range(10_000))
    queue = WaitingQueue([job("j", depends_on="s"), job("k", depends_on=Dependencies(failed=("s",)))])
    view = View(machine(), queue, ended=Ended(), arrays={"s": tasks})
    assert asked_for(view) == set(tasks)
    for name in ("s_3", "s_0", "s_1"):
        view.ended[name] = State.FINISHED
        assert asked_for(view, name) == {name}
    plan = decide(view, NOW, Policy())
    assert re.fullmatch(r"dependency: s_2 .*\(3 of 10000 done\)", str(plan.reason("j")))
    view.ended["s_5"] = State.FAILED
    assert asked_for(view, "s_5") == {"s_5"}
    assert ["dependency: s_5 " in each.reason for each in decide(view, NOW, Policy()).endings] == [True]
    view.ended["s_5"] = State.FINISHED
    queue.changed("s_5")
    assert decide(view, NOW, Policy()).endings == ()


# Added, taken out, or looked at: what is looked at in between decides what is sorted together.
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "look"]), st.integers(0, 30)), max_size=120)


@given(STEPS)
def test_places_are_those_added_and_not_taken_out_in_order(steps: list[tuple[str, int]]) -> None:
    """The same as a plain list that is sorted anew for each look."""
    shape = Shape(shape_key(job("j")))
    plain: list[tuple[int, int, str]] = []
    for step, number in steps:
        one = 0, number, "j"
        if step == "add":
            shape.add(one)
            plain.append(one)
        elif step == "discard":
            shape.discard(one)
            if one in plain:
                plain.remove(one)
        else:
            assert shape.eligible == sorted(plain)
    assert shape.eligible == sorted(plain)


def carry_out(seen: View, jobs: list[Waiting], plan: Plan, at_ns: int) -> list[Running]:
    """Start what the plan starts, as the dispatcher takes it in."""
    started = []
    by_name = {job.name: job for job in jobs}
    for start in plan.starts:
        run = replace(as_run(by_name[start.name], start.grant, at_ns), run=1)
        seen.queue.remove(run.name)
        seen.running.put(run)
        seen.past.begin(run.user, run.spec.project, run.grant, at_ns)
        started.append(run)
    return started


@given(
    before=st.lists(waiting([f"old{number}" for number in range(4)]), max_size=4, unique_by=lambda job: job.name),
    jobs=st.lists(waiting(NAMES), max_size=8, unique_by=lambda job: job.name),
    policy=POLICIES,
    ran_s=st.sampled_from([1, 100, 5000]),
)
def test_who_does_not_start_now_does_not_start_in_the_same_moment(before, jobs, policy, ran_s):
    """Of the same instant a second decision starts nobody and ends nobody: the dispatcher need not make it."""
    earlier = view(*before, on=BOX)
    runs = carry_out(earlier, before, decide(earlier, NOW - ran_s * S, policy), NOW - ran_s * S)
    seen = view(*jobs, on=BOX, running=runs)
    plan = decide(seen, NOW, policy)
    if plan.endings:
        return
    carry_out(seen, jobs, plan, NOW)
    again = decide(replace(seen, holding=plan.holding), NOW, policy)
    assert (again.starts, again.endings) == ((), ())
