"""`--time_budget`, with clocks of our own."""

import json

import pytest

from utils.training.time_budget import TimeBudget


class Machine:
    """Trains by the plans of a budget: each step, evaluation and checkpoint takes its time."""

    def __init__(self, seconds, start=5.0, per_step=lambda step: 0.1, evaluation=2.0, **options):
        self.time, self.per_step, self.evaluation = start, per_step, evaluation
        values = {"most_steps": 10**8, "most_text": "no more", "steps_per_epoch": 50} | options
        self.budget = TimeBudget(seconds, lambda: self.time, **values)
        self.lines, self.evaluated = [], []

    def run(self, step=0, until=None) -> int:
        """Returns the last step; with `until` it is stopped there."""
        budget = self.budget
        self.time += 3 * self.per_step(0)  # the first step compiles
        while True:
            step += 1
            self.time += self.per_step(step)
            plan = budget.plans[-1] if budget.plans else None
            if step >= budget.next_step and (plan is None or step < plan.total_steps):
                look = budget.look(step)
                if look.estimates:
                    self.time += 0.1
                    budget.evaluated(self.evaluation, 0.1)
                    look = budget.look(step)
                assert not look.refusal, look.refusal
                budget.take(look)
                self.lines += [look.line] if look.line else []
                if look.rehearses:
                    self.time += 2
                    budget.rehearsed(1.0, 1.0)
            plan = budget.plans[-1] if budget.plans else None
            total = plan.total_steps if plan else budget.most_steps
            if step == until:
                return step
            every = plan.eval_every * budget.steps_per_epoch if plan else 0
            if step >= total or (every and step % every == 0):
                self.time += self.evaluation
                budget.evaluated(self.evaluation)
                self.evaluated.append(step)
            if step >= total:
                self.time += 2 + budget.end_seconds + (budget.end_evaluations - 1) * self.evaluation
                return step


def slower_in_the_middle(step):
    return 0.2 if 200 < step < 400 else 0.1


@pytest.mark.parametrize("seconds", [30, 60, 600, 36000])
@pytest.mark.parametrize(
    "per_step",
    [
        lambda step: 0.1,
        lambda step: 2.0,
        lambda step: 0.02,
        lambda step: 0.1 + 0.1 * (step > 100),
        lambda step: 0.1 - 0.05 * (step > 100),
        lambda step: 0.1 * (1 + 0.3 * (step % 7 == 0)),
        lambda step: 0.1 + 1e-6 * step,
        slower_in_the_middle,
    ],
)
def test_a_run_ends_within_its_time(seconds, per_step):
    machine = Machine(seconds, per_step=per_step, end_evaluations=1.5, end_seconds=2)
    machine.run()
    assert machine.time <= seconds + min(0.02 * seconds, 20)
    assert machine.time >= 0.95 * seconds - per_step(0) - machine.evaluation * (seconds == 30)
    assert machine.evaluation * (len(machine.evaluated) - 1) <= 0.2 * seconds
    assert len(machine.lines) <= min(4, len(machine.budget.plans))


def test_small_corrections_are_not_told():
    """Steps whose time comes and goes: many plans, a few lines."""
    machine = Machine(60, per_step=lambda step: 0.1 * (1 + 0.5 * (step // 40 % 2)))
    machine.run()
    assert len(machine.budget.plans) > len(machine.lines)


def test_on_a_slower_machine_all_takes_longer():
    machine = Machine(60, per_step=lambda step: 0.1 + 0.04 * (step > 100), eval_every=0)
    machine.evaluation = 4.0
    last = machine.run(until=250)  # the evaluation has been estimated again
    assert last == 250 and machine.budget.end == pytest.approx(4 + 1.4 * (1 + 1))


def test_a_steady_machine_keeps_its_first_plan():
    machine = Machine(600)
    machine.run()
    assert len(machine.lines) == 1
    assert machine.lines[0].startswith("time budget 10:00: 5,")
    assert "evaluated every 4 epochs, 6 s for the end" in machine.lines[0]  # 4 * 50 * 0.1 s


def test_no_more_steps_than_asked_for():
    machine = Machine(600, most_steps=300, most_text="more are not trained, by --epochs")
    assert machine.run() == 300
    assert machine.lines[0].endswith("; more are not trained, by --epochs")


def test_evaluations_only_at_the_end():
    machine = Machine(60, eval_every=0)
    last = machine.run()
    assert machine.evaluated == [last]


def test_what_is_too_short_is_refused_with_the_least_that_would_do():
    machine = Machine(20, start=15, evaluation=30.0)
    with pytest.raises(AssertionError, match=r"20s is too short.* take about 55s here"):
        machine.run()
    assert Machine(60, start=15, evaluation=30.0).run() > 1


def test_earlier_time_and_plans_count():
    """Resumed from a checkpoint of step 1000, after 110 s."""
    first = Machine(600)
    first.run(until=1000)
    plans = json.loads(json.dumps(first.budget.plans))
    resumed = Machine(600, start=first.time, plans=plans)
    assert abs(resumed.run(1000) - plans[-1][1]) < 60  # the start took some steps' time
    assert 570 < resumed.time < 612
