"""Whatever the inputs: predictions are possible numbers, and better machines never make them worse."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wbridge.config import Config
from wbridge.plan.advise import MODES, Speeds, Steps, advise, predict
from wbridge.plan.loads import Load, even_load

speed = st.floats(0.01, 1000)
seconds = st.floats(0.001, 100)
configs = st.builds(
    Config,
    snapshot_versions=st.integers(1, 3),
    checksum=st.sampled_from(["auto", "on", "off"]),
    delivery=st.sampled_from(["auto", "every", "latest"]),
)
all_speeds = st.builds(
    Speeds,
    snapshot_gb_s=speed,
    apply_gb_s=speed,
    device_gb_s=speed,
    host_gb_s=speed,
    link_gb_s=speed,
    checksum_gb_s=st.just(0.0) | speed,
    round_s=st.floats(0, 0.1),
    change_s=st.floats(0, 0.01),
)
all_steps = st.builds(Steps, train_s=seconds, rollout_s=seconds)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    return even_load(
        model_nbytes=draw(st.integers(1, 10**12)),
        num_trainers=draw(st.integers(1, 64)),
        num_engines=draw(st.integers(1, 16)),
        workers_per_engine=draw(st.integers(1, 16)),
        slot_nbytes=draw(st.integers(10**4, 10**9)),
        trainers_per_host=draw(st.integers(0, 8)),
        engines_per_host=draw(st.integers(1, 4)),
    )


@given(loads(), all_speeds, all_steps, configs, st.integers(0, 20))
def test_predictions_are_possible(
    load: Load, speeds: Speeds, steps: Steps, config: Config, num_slots: int
) -> None:
    advice = advise(load, speeds, steps, config, ring_sizes=(0, num_slots))
    assert advice.best in advice.predictions
    for p in advice.predictions:
        assert 0 <= p.busy <= 1 and 0 < p.applied <= 1
        assert p.staleness_versions >= -1e-9
        assert p.train_steps_per_s <= 1 / steps.train_s and p.rollout_steps_per_s <= 1 / steps.rollout_s
        assert min(p.transfer_s, p.trainer_stall_s, p.rollout_stall_s, p.agst_s) > 0
        assert 1 <= p.num_slots <= load.num_groups


@given(loads(), all_speeds, all_steps, configs, st.sampled_from(sorted(MODES)))
def test_a_faster_link_or_a_longer_ring_makes_no_transfer_longer(
    load: Load, speeds: Speeds, steps: Steps, config: Config, name: str
) -> None:
    faster = Speeds(**{**{f: getattr(speeds, f) for f in speeds.__struct_fields__}, "link_gb_s": 2000.0})
    usual = predict(name, load, speeds, steps, config, num_slots=2)
    assert predict(name, load, faster, steps, config, num_slots=2).transfer_s <= usual.transfer_s
    assert predict(name, load, speeds, steps, config, num_slots=3).transfer_s <= usual.transfer_s
