"""The driver's timing, on the virtual clock: what is due when, what waits for what, how a run ends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.load import clock
from replay.load.driver import Driver, Progress
from replay.load.outcome import Outcome, Request
from replay.load.remaining import Remaining
from replay.load.schedule import Schedule, Settings
from replay.trace import Header, Trace, Turn

HEADER = Header(format="replay-trace", version=1, name="test")


class Server:
    """Answers each request after a fixed time; fails those it is told to."""

    def __init__(self, service: float = 1.0, failing: frozenset[str] = frozenset(), hang: bool = False):
        self.service, self.failing, self.hang = service, failing, hang
        self.seen: list[Request] = []

    async def send(self, request: Request) -> Outcome:
        loop = asyncio.get_running_loop()
        self.seen.append(request)
        sent = loop.time()
        await asyncio.sleep(1e9 if self.hang else self.service)
        status = "error" if request.id in self.failing else "ok"
        return Outcome(status, sent=sent, closed=loop.time(), prompt_tokens=request.prompt)


def replay(turns: list[Turn], server: Server | None = None, stop_at: float | None = None, **settings):
    server = server or Server()
    schedule = Schedule(Trace(HEADER, turns), Settings(**settings))
    rows: list[dict] = []

    async def main() -> Progress:
        driver = Driver(schedule, server, rows.append)
        if stop_at is not None:
            asyncio.get_running_loop().call_later(stop_at, driver.stop)
        return await driver.run(clock.RunClock())

    progress = clock.run(main(), virtual=True)
    return {f"{r['session']}/{r['turn']}": r for r in rows}, progress, server


def turn(session: str, number: int, **fields) -> Turn:
    fields.setdefault("append", [(f"{session}.{number}", 100)])
    if number == 0 and "after" not in fields and "parent" not in fields:
        fields.setdefault("at", 0.0)
    return Turn(session=session, turn=number, **fields)


def test_a_turn_is_due_when_the_previous_ended_and_its_pause_is_over():
    rows, _, _ = replay([turn("a", 0, at=5.0), turn("a", 1, pause=3.0), turn("b", 0, at=7.5)])
    assert rows["a/0"]["due"] == 0.0, "the trace's first start is the run's start"
    assert rows["b/0"]["due"] == 2.5
    assert rows["a/1"]["due"] == 4.0
    assert all(row["sent"] == row["due"] for row in rows.values())


def test_speed_divides_starts_and_pauses_but_not_service_time():
    rows, _, _ = replay([turn("a", 0), turn("a", 1, pause=4.0), turn("b", 0, at=8.0)], speed=2.0)
    assert rows["a/1"]["due"] == 3.0
    assert rows["b/0"]["due"] == 4.0


def test_a_join_waits_for_all_its_children_and_counts_its_pause_from_the_last():
    turns = [
        turn("main", 0),
        turn("child1", 0, parent="main/0", pause=1.0),
        turn("child2", 0, parent="main/0", pause=5.0),
        turn("main", 1, after=["main/0", "child1/0", "child2/0"], pause=2.0),
    ]
    rows, _, _ = replay(turns)
    assert rows["main/1"]["due"] == 1.0 + 5.0 + 1.0 + 2.0


def test_concurrency_starts_the_next_session_when_a_slot_frees():
    rows, progress, _ = replay([turn(s, n) for s in "abcde" for n in (0, 1)], concurrency=2)
    assert progress.peak_in_flight == 2
    assert [rows[f"{s}/0"]["due"] for s in "abcde"] == [0.0, 0.0, 2.0, 2.0, 4.0]


def test_idle_time_is_skipped_only_when_nothing_is_in_flight():
    turns = [turn("a", 0), turn("a", 1, pause=100.0), turn("b", 0, at=50.0)]
    rows, progress, _ = replay(turns, skip_idle=True)
    assert rows["b/0"]["due"] == pytest.approx(1.0), "b follows at once: the system was idle"
    assert rows["a/1"]["due"] == pytest.approx(101.0 - 49.0 - 50.0), "all timers advance by the same idle time"
    assert progress.skipped_s == pytest.approx(99.0)


def test_a_failed_turn_fails_what_depends_on_it_and_nothing_else():
    turns = [turn("a", n) for n in range(4)] + [turn("b", n) for n in range(2)]
    rows, progress, server = replay(turns, Server(failing=frozenset(["a/1"])))
    assert [rows[f"a/{n}"]["status"] for n in range(4)] == ["ok", "error", "dropped", "dropped"]
    assert [rows[f"b/{n}"]["status"] for n in range(2)] == ["ok", "ok"]
    assert "a/1" in rows["a/3"]["error"]
    assert "a/2" not in [request.id for request in server.seen]
    assert (progress.failed, progress.dropped, progress.done) == (1, 2, 6)


def test_stop_records_what_was_in_flight_as_cancelled():
    rows, progress, _ = replay([turn("a", 0), turn("a", 1)], Server(hang=True), stop_at=3.0)
    assert progress.stopped
    assert [row["status"] for row in rows.values()] == ["cancelled"]


def test_a_restart_waits_for_what_is_in_flight_and_makes_nothing_late():
    class Restartable(Server):
        restarted: float | None = None

        async def restart(self) -> None:
            await asyncio.sleep(60.0)
            self.restarted = asyncio.get_running_loop().time()

    turns = [turn("a", 0), turn("a", 1, pause=1.0), turn("b", 0, at=0.5), turn("c", 0, at=0.8)]
    server = Restartable(service=2.0)
    rows, progress, _ = replay(turns, server, restart_at=0.6)
    assert server.restarted == 62.5, "b was answered at 2.5"
    assert progress.restarted_at == 2.5
    assert rows["c/0"]["due"] == rows["c/0"]["sent"] == pytest.approx(62.7), "due 0.2 s after the restart was"
    assert rows["a/1"]["due"] == rows["a/1"]["sent"] == 63.5, "its pause of 1 s begins as time goes on"


def test_a_stop_breaks_off_a_restart():
    class Restarting(Server):
        async def restart(self) -> None:
            await asyncio.sleep(1e9)

    rows, progress, _ = replay([turn("a", 0), turn("a", 1, pause=9.0)], Restarting(), restart_at=2.0, stop_at=5.0)
    assert progress.stopped and progress.now == 5.0
    assert list(rows) == ["a/0"]


def test_absolute_times_slip_instead_of_pausing():
    rows, _, _ = replay([turn("a", 0), turn("a", 1, at=0.25, pause=9.0)], absolute=True)
    assert rows["a/1"]["due"] == 0.25
    assert rows["a/1"]["sent"] == 1.0


def test_clones_share_only_what_sessions_share():
    turns = [turn(s, 0, append=[("tools", 512), (f"own-{s}", 100)]) for s in "ab"]
    rows, _, _ = replay(turns, sessions=4)
    assert [r["session"] for r in rows.values()] == ["a", "a#2", "b", "b#2"]
    assert rows["a#2/0"]["ideal_tokens"] == 512
    _, _, alone = replay([turn("a", 0)], sessions=2)
    assert [request.ideal for request in alone.seen] == [0, 0]


def test_fewer_sessions_than_the_trace_holds_takes_the_first():
    rows, _, _ = replay([turn(s, 0) for s in "abc"], sessions=2)
    assert set(rows) == {"a/0", "b/0"}


def test_ideal_reuse_counts_prompt_and_output_of_earlier_requests():
    rows, _, _ = replay([turn("a", 0, output=50), turn("a", 1), turn("a", 2, keep=120)])
    assert [rows[f"a/{n}"]["ideal_tokens"] for n in range(3)] == [0, 150, 120]


def test_scaled_lengths_keep_the_shape_of_the_prefix():
    rows, _, server = replay([turn("a", 0, output=50), turn("a", 1), turn("a", 2, keep=150)], scale_tokens=0.1)
    assert [request.prompt for request in server.seen] == [10, 25, 25]
    assert [rows[f"a/{n}"]["ideal_tokens"] for n in range(3)] == [0, 15, 15]


def test_prompts_beyond_the_models_context_are_refused_or_dropped_with_counts():
    big = turn("a", 1, append=[("big", 5000)])
    trace = Trace(HEADER, [turn("a", 0), big, turn("a", 2), turn("b", 0)])
    with pytest.raises(ReplayError, match=r"2 of 4 turns .*a/2.*--too-long drop"):
        Schedule(trace, Settings(), max_context=1000)
    schedule = Schedule(trace, Settings(too_long="drop"), max_context=1000)
    rows: list[dict] = []
    clock.run(_drive(Driver(schedule, Server(), rows.append)), virtual=True)
    assert {f"{r['session']}/{r['turn']}": r["status"] for r in rows} == {
        "a/0": "ok", "a/1": "dropped", "a/2": "dropped", "b/0": "ok",
    }  # fmt: skip
    assert all("exceed the model's 1,000" in r["error"] for r in rows if r["status"] == "dropped")
    with pytest.raises(
        ReplayError, match=r"2 of 4 turns do not fit the GPU tier's 801 tokens .*raise tiers.gpu.tokens"
    ):
        Schedule(trace, Settings(), max_context=1000, gpu_tokens=800)
    with pytest.raises(ReplayError, match=r"2 of 2 turns do not fit .*--scale-tokens \S+$"):
        Schedule(Trace(HEADER, [turn("a", 0), turn("b", 0)]), Settings(too_long="drop"), max_context=10)


async def _drive(driver: Driver) -> Progress:
    return await driver.run(clock.RunClock())


def test_contradictory_or_senseless_settings_are_refused():
    for wrong in (
        {"speed": 0},
        {"sessions": 0},
        {"scale_tokens": float("nan")},
        {"absolute": True, "concurrency": 2},
    ):
        with pytest.raises(ReplayError, match="--"):
            Settings(**wrong)


@st.composite
def traces(draw):
    turns = []
    for s in range(draw(st.integers(1, 4))):
        for n in range(draw(st.integers(1, 5))):
            fields = {"pause": draw(st.sampled_from([0.0, 0.1, 7.0])), "output": draw(st.integers(0, 30))}
            if n == 0:
                fields["at"] = draw(st.sampled_from([0.0, 1.0, 2.5]))
                if turns and draw(st.booleans()):
                    fields["parent"] = str(draw(st.sampled_from(turns)).ref)
                    fields["keep"] = 0
            turns.append(turn(f"s{s}", n, **fields))
    return turns


@given(traces(), st.sampled_from([None, 1, 2]), st.booleans(), st.integers(1, 6))
def test_every_turn_is_sent_exactly_once_and_never_before_what_it_waits_for(turns, concurrency, skip_idle, sessions):
    rows, progress, server = replay(turns, concurrency=concurrency, skip_idle=skip_idle, sessions=sessions)
    ids = [request.id for request in server.seen]
    assert len(ids) == len(set(ids)) == len(rows) == progress.total
    closed = {key: row["closed"] for key, row in rows.items()}
    for request in server.seen:
        if request.parent_id is not None:
            assert rows[request.id]["sent"] >= closed[request.parent_id] - 1e-6
    assert all(row["sent"] >= row["due"] - 1e-6 for row in rows.values())


def test_the_real_clock_runs_the_same_code():
    rows: list[dict] = []
    schedule = Schedule(Trace(HEADER, [turn("a", 0), turn("a", 1, pause=0.02)]), Settings())
    progress = clock.run(_drive(Driver(schedule, Server(0.01), rows.append)), virtual=False)
    assert progress.done == 2
    assert 0.03 <= rows[1]["due"] < 1.0


def test_waiting_for_nothing_on_the_virtual_clock_is_an_error_not_a_hang():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Deadlock):
        clock.run(main(), virtual=True)


def test_a_sink_that_fails_ends_the_run_with_its_error():
    def full(row: dict) -> None:
        raise ReplayError("disk full")

    schedule = Schedule(Trace(HEADER, [turn("a", 0), turn("a", 1, pause=5.0), turn("b", 0)]), Settings())

    async def main() -> None:
        await Driver(schedule, Server(), full).run(clock.RunClock())

    with pytest.raises(ReplayError, match="disk full"):
        clock.run(main(), virtual=True)


def foretold(turns: list[Turn], failing: frozenset[str] = frozenset(), **settings) -> tuple[list[float | None], float]:
    """What the driver says after each row of when the run ends at the earliest, and when it did."""
    schedule = Schedule(Trace(HEADER, turns), Settings(**settings))
    said: list[float | None] = []

    async def main() -> Progress:
        driver = Driver(schedule, Server(0.25, failing), lambda row: None, lambda progress: said.append(progress.ends))
        driver._remaining = Remaining(schedule)  # on the virtual clock nobody waits, so it does not look ahead itself
        return await driver.run(clock.RunClock())

    return said, clock.run(main(), virtual=True).now


def test_the_pauses_to_come_say_how_long_a_run_lasts_at_least():
    chain = [turn("a", 0), turn("a", 1, pause=100.0), turn("a", 2, pause=20.0)]
    said, end = foretold([*chain, turn("b", 0, at=90.0)])
    assert said[0] == 120.25, "after the first answer at 0.25 s: both pauses"
    assert end == 120.75
    said, _ = foretold([turn("a", 0), turn("a", 1, pause=3.0), turn("b", 0, at=500.0)])
    assert said[0] == 500.0, "the span of the trace"
    said, end = foretold([step for n in range(6) for step in (turn(f"s{n}", 0), turn(f"s{n}", 1, pause=60.0))],
                         concurrency=2)  # fmt: skip
    assert 120 < said[0] <= end == pytest.approx(181.5)
    assert foretold(chain, skip_idle=True)[0] == [None, None, None]
    assert foretold(chain, frozenset(["a/0"]))[0][0] in (None, 0.25), "what depends on a failed turn is never sent"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 50), st.floats(0, 90), st.integers(-3, 20)), min_size=1, max_size=20
    ),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
)
def test_a_run_never_ends_before_it_was_said_to(drawn, concurrency: int | None, absolute: bool):
    turns: list[Turn] = []
    numbers: dict[str, int] = {}
    for session, pause, at, waits_for in drawn:
        name = f"s{session}"
        number = numbers[name] = numbers.get(name, -1) + 1
        more = {}
        if 0 <= waits_for < len(turns):
            other = turns[waits_for]
            more["after"] = [f"{other.session}/{other.turn}", *([f"{name}/{number - 1}"] if number else [])]
        turns.append(turn(name, number, pause=pause, at=at, **more))
    said, end = foretold(turns, concurrency=concurrency, absolute=absolute and concurrency is None)
    assert all(time is None or time <= end + 1e-6 for time in said)
