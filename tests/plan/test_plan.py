"""`plan`: its figures against the curve and the cost model, its choice, and its text."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from replay.backends import preset
from replay.backends.connect import Where
from replay.engine import profiles
from replay.errors import ReplayError
from replay.load.schedule import Schedule, Settings
from replay.plan import Plan, Slo, plan
from replay.plan.advice import DISK_ERROR, KNOWN_ERROR
from replay.plan.page import page
from replay.plan.render import render
from replay.plan.stream import interleaved, trace_curve
from replay.runs import predict, simulate
from replay.trace import Header, Trace, Turn
from replay.trace.model import FORMAT, VERSION

MODEL, GPU = profiles.model("qwen3-8b"), profiles.gpu("h100")
BACKENDS = tuple(preset.load(name) for name in ("vllm", "lmcache-cpu", "lmcache-disk"))


def trace(*turns: Turn, **header: Any) -> Trace:
    return Trace(Header(format=FORMAT, version=VERSION, name="t", **header), turns)


def chats(sessions: int, turns: int = 4, first: int = 20_000, more: int = 1_000) -> Trace:
    """Sessions that share nothing, overlapping in time, each turn adding to the last."""
    made = []
    for s in range(sessions):
        for t in range(turns):
            at = 10.0 * s if t == 0 else None
            append = [(f"{s}/{t}", first if t == 0 else more)]
            made.append(Turn(session=f"s{s}", turn=t, at=at, pause=15.0 if t else 0.0, append=append, output=50))
    return trace(*made)


def planned(asked: Trace | None = None, **options: Any) -> Plan:
    return plan(asked or chats(8), MODEL, GPU, BACKENDS, **options)


def test_json_has_the_stable_keys_and_plain_values() -> None:
    data = json.loads(json.dumps(planned().as_dict(), allow_nan=False))
    assert {"ceiling", "curve", "knee", "tiers", "recommendation"} <= set(data)
    assert set(data["ceiling"]) == {"hit_tokens", "hit_share"}
    assert all(set(row) == {"tokens", "gib", "hit_tokens", "hit_share"} for row in [*data["curve"], data["knee"]])
    assert [tier["tier"] for tier in data["tiers"]] == ["gpu", "cpu", "disk"]
    assert [tier["pays"] for tier in data["tiers"]] == [None, True, True]
    assert {"context", "gbps", "rebuild_s", "load_s", "pays"} <= set(data["tiers"][1]["break_even"][0])


def test_the_curve_rises_to_the_ceiling() -> None:
    result = planned()
    capacities = [row["tokens"] for row in result.curve]
    hits = [row["hit_tokens"] for row in result.curve]
    assert capacities == sorted(set(capacities)) and hits == sorted(set(hits))
    assert hits[-1] == result.ceiling["hit_tokens"]
    row = result.curve[-1]
    assert row["gib"] == pytest.approx(row["tokens"] * 147_456 / 2**30)


def test_the_ceiling_is_what_earlier_prompts_hold_in_whole_blocks() -> None:
    result = planned(chats(1, turns=3, first=1_000, more=100))
    assert result.prompts["total"] == 1_000 + 1_150 + 1_300
    assert result.ceiling["hit_tokens"] == 1_000 // 16 * 16 + 1_150 // 16 * 16 - (1_150 - 1_100) // 16 * 16 + 48


def test_tiers_add_up_to_the_ceiling() -> None:
    result = planned(chats(40, first=25_000))
    gpu, cpu, disk = result.tiers
    assert gpu.hit_tokens + cpu.hit_tokens + disk.hit_tokens + disk.headroom_tokens == result.ceiling["hit_tokens"]
    assert gpu.headroom_tokens == cpu.hit_tokens + cpu.headroom_tokens


def test_ten_more_gigabytes_are_worth_what_the_curve_says() -> None:
    small = [preset.load("vllm", ["tiers.gpu.tokens=60000"])]
    asked = chats(8)
    result = plan(asked, MODEL, GPU, small)
    curve = trace_curve(asked, 16)
    more = curve.hit_tokens(60_000 + 10e9 / 147_456) - curve.hit_tokens(60_000)
    assert result.tiers[0].next_10gb_tokens == more > 0
    assert result.tiers[0].next_10gb_saved_s > 0


def test_break_even_is_kv_bytes_over_prefill_time() -> None:
    tier = planned().tiers[1]
    for cell in tier.break_even:
        assert cell.gbps == pytest.approx(cell.context * 147_456 / cell.rebuild_s / 1e9)
        assert cell.pays == (cell.effective_gbps > cell.gbps)
    at_16k = next(cell for cell in tier.break_even if cell.context == 16_384)
    assert at_16k.gbps == pytest.approx(16_384 * 147_456 / 0.5 / 1e9, rel=0.05)  # half a second was measured
    assert max(cell.context for cell in tier.break_even) <= MODEL.max_context


@given(st.floats(0.05, 50))
def test_a_tier_pays_exactly_above_its_break_even(gbps: float) -> None:
    disk = preset.load("lmcache-disk", [f"tiers.disk.gbps={gbps}"])
    tier = plan(chats(2), MODEL, GPU, [disk]).tiers[-1]
    assert tier.bandwidth_source == "given" and tier.bandwidth_gbps == gbps
    assert tier.typical is not None
    assert tier.pays == (gbps > tier.typical.gbps)


def test_a_slow_disk_is_not_recommended_however_many_hits_it_has() -> None:
    slow = plan(chats(60, first=20_000), MODEL, profiles.gpu("h200"), BACKENDS)
    disk = slow.recommendation["candidates"][2]
    assert disk["slow_tiers"] == ("disk",)
    assert slow.recommendation["backend"] != "lmcache-disk"


def serving(share: float | None) -> Any:
    return lambda backend: {"ttft_p50": 0.1, "ttft_p95": 0.5, "served_share": share}


def test_what_is_served_is_simulated_and_the_curve_is_its_bound() -> None:
    bounds = [row["hit_share"] for row in planned().recommendation["candidates"]]
    result = planned(simulate=serving(bounds[0] - 0.02))
    rows = result.recommendation["candidates"]
    assert [row["hit_share"] for row in rows] == bounds
    assert [row["served_share"] for row in rows] == [bounds[0] - 0.02] * 3
    assert "served_share" not in rows[0]["predicted"]
    assert not any("of its bound" in note for note in result.notes)
    assert [row["served_share"] for row in planned().recommendation["candidates"]] == [None] * 3


def test_a_recommended_backend_far_below_its_bound_is_noted_with_both_figures() -> None:
    result = planned(simulate=serving(0.3))
    bound = result.recommendation["candidates"][0]["hit_share"]
    (note,) = [note for note in result.notes if "bound" in note]
    assert note.startswith("vllm serves 30.0 % of the prompts when simulated, ")
    assert f"not the {100 * bound:.1f} % of its bound" in note


def test_the_recommended_capacity_is_simulated_as_a_gpu_tier_of_its_own() -> None:
    asked: list[int | None] = []

    def simulate(backend: preset.Preset) -> dict[str, float | None]:
        asked.append(backend.tiers.gpu.tokens)
        return {"ttft_p95": 1.0, "served_share": 0.3 if backend.tiers.gpu.tokens else 0.9}

    result = planned(simulate=simulate)
    size = result.recommendation["capacity"]
    assert asked == [None, None, None, size["tokens"]] and size["served_share"] == 0.3
    text = shown(result)
    assert "alone serve 30.0 % of the prompts when simulated, not the" in text and "of their bound" in text
    bound = shown(planned())
    assert planned().recommendation["capacity"]["served_share"] is None
    assert "serve at most" in bound and "a bound, not simulated" in bound


def test_a_capacity_that_no_gpu_tier_can_have_is_not_simulated() -> None:
    small = preset.load("vllm", ["tiers.gpu.tokens=60000"])
    large = plan(chats(8), MODEL, GPU, [small], simulate=serving(0.5)).recommendation["capacity"]
    assert large["tokens"] > 60_000 and large["served_share"] is None
    lower = plan(chats(8), MODEL, GPU, BACKENDS[1:], simulate=serving(0.5)).recommendation["capacity"]
    assert lower["served_share"] is None


def test_the_served_share_is_that_of_the_simulated_rows() -> None:
    where = Where(preset.load("vllm", ["tiers.gpu.tokens=60000"]), target="sim", model="qwen3-8b", gpu="h100")
    rows = simulate(chats(8), where)
    found = predict(chats(8), where, Settings())
    prompt = sum(row["prompt_tokens"] for row in rows)
    assert found["served_share"] == pytest.approx(sum(row["gpu_tokens"] for row in rows) / prompt)
    result = plan(chats(8), MODEL, GPU, [where.preset], simulate=lambda choice: predict(chats(8), where, Settings()))
    row = result.recommendation["candidates"][0]
    assert 0 < row["served_share"] < row["hit_share"]


def test_the_known_errors_are_those_of_the_table_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/accuracy.md").read_text("utf-8")
    table = text.split("## Runs that no coefficient was fitted to")[1]
    errors: dict[bool, list[list[float]]] = {False: [], True: []}
    for line in table.splitlines():
        cells = line.split(" | ")
        if line.startswith("| `"):
            errors["disk" in cells[0]].append([int(part.strip(" %")) / 100 for part in cells[4].split("/")])
    assert len(errors[False]) == 16 and len(errors[True]) == 4
    for at, metric in enumerate(("ttft_p50", "ttft_p90", "ttft_p99")):
        assert max(abs(row[at]) for row in errors[False]) == KNOWN_ERROR[metric]
        of_disks = [row[at] for row in errors[True]]
        assert (min(of_disks), max(of_disks)) == DISK_ERROR[metric]


def test_errors_are_told_with_the_range_of_disks_only_where_times_were_measured() -> None:
    times = serving(0.9)
    text = shown(planned(simulate=times, known_error=KNOWN_ERROR))
    assert "ttft_p50 within 27 %" in text and "far more with a disk: ttft_p50 -70 to +54 %" in text
    memory = plan(chats(8), MODEL, GPU, BACKENDS[:2], simulate=times, known_error=KNOWN_ERROR)
    assert memory.recommendation["known_disk_error"] is None and "with a disk" not in shown(memory)
    derived = plan(chats(2), MODEL, profiles.gpu("a100"), BACKENDS, simulate=times, known_error=KNOWN_ERROR)
    assert "the model's error is not known here" in shown(derived)


def test_a_disk_has_the_rate_of_a_load_alone_and_the_sustained_one() -> None:
    result = plan(chats(8), MODEL, profiles.gpu("h200"), BACKENDS)
    disk = result.tiers[-1]
    assert disk.load_gbps is not None and disk.bandwidth_gbps is not None and disk.load_gbps > disk.bandwidth_gbps
    text = shown(result)
    assert "load GB/s sustained" in text and "(times from a measured profile)" in text and "measured times" not in text
    assert f"disk loads at the sustained {disk.bandwidth_gbps:.3f} GB/s, limited by writes" in text
    assert "cpu loads at the sustained" not in text  # it has one rate
    html = page(result).html()
    assert "times from a measured profile" in html and "measured times" not in html
    assert "exact" not in text and "upper bound" in text and "exact counts" not in html and "upper bound" in html


def shown(result: Plan) -> str:
    """The text, with lines joined."""
    console = Console(width=80, record=True, file=StringIO())
    console.print(render(result))
    return " ".join(console.export_text().split())


def simulated(**p95: float) -> Any:
    return lambda backend: {
        "ttft_p50": p95[backend.name.replace("-", "_")] / 3,
        "ttft_p95": p95[backend.name.replace("-", "_")],
    }


def test_the_cheapest_backend_that_keeps_the_slo_is_recommended() -> None:
    times = simulated(vllm=3.0, lmcache_cpu=1.0, lmcache_disk=1.5)
    prices = {"gpu_hour": 2.0, "cpu_gib_month": 3.0, "disk_gib_month": 0.1}
    slo = Slo.parse("ttft_p95=2s")
    result = planned(simulate=times, slo=slo, prices=prices).recommendation
    assert result["backend"] == "lmcache-disk" and "cheapest" in result["why"] and result["simulated"]
    assert [row["meets_slo"] for row in result["candidates"]] == [False, True, True]
    assert result["candidates"][1]["cost_month"] == pytest.approx(2 * 730 + 100 * 3)
    assert planned(simulate=times, slo=slo).recommendation["backend"] == "lmcache-cpu"


def test_no_backend_is_recommended_where_none_keeps_the_slo() -> None:
    times = simulated(vllm=3.0, lmcache_cpu=1.0, lmcache_disk=1.5)
    result = planned(simulate=times, slo=Slo.parse("ttft_p95=500ms")).recommendation
    assert result["backend"] is None
    assert "lmcache-cpu comes nearest with 1.00 s" in result["why"]


def test_an_unknown_prediction_neither_meets_nor_misses_the_slo() -> None:
    result = planned(simulate=lambda backend: {"ttft_p95": None}, slo=Slo.parse("ttft_p95=2s")).recommendation
    assert [row["meets_slo"] for row in result["candidates"]] == [None] * 3
    assert "no times" in result["why"]


@pytest.mark.parametrize("text", ["ttft_p95", "ttft_p95=", "ttft_p95=-1s", "ttft_p95=0", "p95<2s", "ttft_p42=1s"])
def test_a_malformed_slo_is_refused(text: str) -> None:
    with pytest.raises(ReplayError):
        Slo.parse(text)


def test_slo_units() -> None:
    assert Slo.parse("ttft_p50=300ms") == Slo("ttft_p50", 0.3)
    assert Slo.parse("ttft_p99 <= 2.5") == Slo("ttft_p99", 2.5)


def test_unknown_prices_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"unknown price 'gpu_hours'; nearest: .*gpu_hour"):
        planned(prices={"gpu_hours": 3.0})
    with pytest.raises(ReplayError, match="positive"):
        planned(prices={"gpu_hour": float("nan")})


def test_prompts_below_one_block_cannot_be_planned_for() -> None:
    with pytest.raises(ReplayError, match="no prompt fills a block of 16 tokens"):
        planned(chats(1, turns=1, first=10))


def test_prompts_beyond_the_model_and_scaled_times_are_noted() -> None:
    result = plan(chats(1, turns=1, first=50_000), MODEL, profiles.gpu("a100"), BACKENDS)
    assert "1 of 1 prompts are longer than qwen3-8b's context of 40,960 tokens" in result.notes[0]
    assert "not measured" in result.notes[1] and result.cost_source == "derived"


def test_nothing_reused_has_no_knee() -> None:
    result = planned(chats(3, turns=1))
    assert result.knee is None and result.ceiling["hit_tokens"] == 0


def test_fewer_live_sessions_need_less_cache() -> None:
    asked = chats(12)
    one, all_of_them = (trace_curve(asked, 16, sessions=n) for n in (1, 12))
    assert one.ceiling == all_of_them.ceiling
    assert one.working_set < all_of_them.working_set / 3


def test_more_sessions_than_the_trace_has_are_clones() -> None:
    asked = chats(2)
    assert trace_curve(asked, 16, sessions=6).prompt_tokens == 3 * trace_curve(asked, 16).prompt_tokens


def test_steps_are_sent_by_recorded_time_and_after_what_they_wait_for() -> None:
    asked = trace(
        Turn(session="a", turn=0, at=0.0, append=[("a", 100)]),
        Turn(session="a", turn=1, pause=50.0, append=[("a1", 10)]),
        Turn(session="b", turn=0, at=20.0, append=[("b", 100)]),
        Turn(session="b", turn=1, at=90.0, append=[("b1", 10)]),
        Turn(session="b", turn=2, at=30.0, append=[("b2", 10)]),
    )
    schedule = Schedule(asked, Settings())
    assert [step.id for step in interleaved(schedule)] == ["a/0", "b/0", "a/1", "b/1", "b/2"]
    assert [step.id for step in interleaved(schedule, 1)] == ["a/0", "a/1", "b/0", "b/1", "b/2"]


def test_steps_of_one_time_come_in_the_order_of_the_trace() -> None:
    asked = trace(
        Turn(session="a", turn=0, at=0.1, append=[("a", 100)]),
        Turn(session="b", turn=0, at=0.3, append=[("b", 100)]),
        Turn(session="a", turn=1, at=0.3, after=[], append=[("a1", 10)]),
        Turn(session="c", turn=0, at=0.3, append=[("c", 100)]),
    )
    assert [step.id for step in interleaved(Schedule(asked, Settings()))] == ["a/0", "b/0", "a/1", "c/0"]


def test_partial_blocks_count_where_the_trace_names_them() -> None:
    asked = trace(
        Turn(session="a", turn=0, at=0.0, append=[("x", 512), ("y", 100)]),
        Turn(session="b", turn=0, at=1.0, append=[("x", 512), ("y", 512), ("z", 5)]),
        Turn(session="c", turn=0, at=2.0, append=[("x", 512), ("y", 300)]),
        block_tokens=512,
    )
    assert trace_curve(asked, 512).ceiling == 1024  # "x" twice; "y" is a full block in one prompt only
    whole = trace_curve(asked, 512, partial=True)
    assert whole.ceiling == 1024 + 812
    assert whole.prompt_tokens == 612 + 1029 + 812


@pytest.mark.parametrize("width", [80])
def test_the_text_fits_the_terminal_and_marks_simulated_times(width: int) -> None:
    times = simulated(vllm=3.0, lmcache_cpu=1.0, lmcache_disk=1.5)
    result = planned(chats(40), simulate=times, slo=Slo.parse("ttft_p95=2s"), known_error={"ttft_p50": 0.1})
    console = Console(width=width, record=True, file=StringIO())
    console.print(render(result))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for expected in ("Hits by capacity", "break-even", "knee", "TTFT are simulated", "Recommended: lmcache-cpu"):
        assert expected in text


def test_text_of_a_plan_without_prediction_or_reuse() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(render(planned(chats(2, turns=1))))
    assert "serves 0 %" in captured.get() and "are simulated" not in captured.get()
