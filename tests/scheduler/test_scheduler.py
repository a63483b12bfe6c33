import pytest

from sidestream.core.request import FinishReason
from sidestream.errors import CapacityError, ConfigError, RequestError
from sidestream.scheduler.scheduler import Scheduler
from tests.scheduler.fake_engine import FakeEngine, make_config, make_request, next_token, solo_run


def test_a_prompt_is_chunked_then_decoded_to_its_length() -> None:
    engine = FakeEngine(make_config(max_num_batched_tokens=5, max_num_seqs=2))
    request = make_request("a", 12, max_tokens=3)
    engine.add(request)
    engine.run()
    chunks = [step.chunks[0] for step in engine.steps]
    assert [(c.start, c.length, c.is_decode, c.samples) for c in chunks] == [
        (0, 5, False, False),
        (5, 5, False, False),
        (10, 2, False, True),
        (12, 1, True, True),
        (13, 1, True, True),
    ]
    assert (engine.outputs["a"], engine.reasons["a"]) == solo_run(request, engine.config)


def test_one_token_first_chunks_and_remainders_are_not_decodes() -> None:
    engine = FakeEngine(make_config(max_num_batched_tokens=4))
    engine.add(make_request("one", 1, max_tokens=2))
    engine.step()
    engine.add(make_request("five", 5, max_tokens=2))  # 3 beside a decode, then 1 + 1 or 2
    engine.run()
    first = [c for step in engine.steps for c in step.chunks if c.start == 0]
    assert [c.is_decode for c in first] == [False, False]
    prompt_of_five = [c for step in engine.steps for c in step.chunks if c.request_id == "five" and c.end <= 5]
    assert not any(c.is_decode for c in prompt_of_five)


def test_decodes_come_first_and_keep_their_token_when_prefills_want_everything() -> None:
    engine = FakeEngine(make_config(max_num_batched_tokens=8))
    engine.add(make_request("short", 2, max_tokens=20))
    engine.step()
    engine.add(make_request("long", 100, max_tokens=1))
    for _ in range(10):
        engine.step()
        chunks = engine.steps[-1].chunks
        assert (chunks[0].request_id, chunks[0].is_decode, chunks[0].length) == ("short", True, 1)
        assert (chunks[1].request_id, chunks[1].length) == ("long", 7)


@pytest.mark.parametrize("budget", [4, 16, 64])
def test_a_short_request_does_not_wait_for_a_long_one(budget: int) -> None:
    engine = FakeEngine(make_config(max_num_batched_tokens=budget, max_model_len=20_000, num_blocks=3_000))
    engine.add(make_request("long", 10_000, max_tokens=1))
    for _ in range(3):
        engine.step()
    engine.add(make_request("short", 4, max_tokens=1))
    steps = 0
    while "short" not in engine.reasons:
        engine.step()
        steps += 1
    assert steps <= 3
    lengths = {c.request_id: c.length for c in engine.steps[-1].chunks}
    assert sum(lengths.values()) == budget or steps > 1, "what the short one leaves goes to the long one"


def test_many_long_prompts_share_by_turns_of_a_quantum() -> None:
    engine = FakeEngine(
        make_config(max_num_seqs=6, num_slots=7, max_num_batched_tokens=8, prefill_quantum=4, num_blocks=401)
    )
    for i in range(6):
        engine.add(make_request(f"r{i}", 60, max_tokens=1))
    for _ in range(30):
        engine.step()
    progress = {f"r{i}": 0 for i in range(6)}
    for step in engine.steps:
        assert [c.length for c in step.chunks] == [4, 4]
        for chunk in step.chunks:
            progress[chunk.request_id] += chunk.length
        assert max(progress.values()) - min(progress.values()) <= 4
    engine.add(make_request("late", 3, max_tokens=1))
    engine.run()
    assert engine.outputs["late"] == solo_run(make_request("late", 3, max_tokens=1), engine.config)[0]


def test_short_prompts_share_a_step_though_it_has_no_room_for_two_quanta() -> None:
    engine = FakeEngine(make_config(max_num_batched_tokens=16, prefill_quantum=16))
    for i in range(4):
        engine.add(make_request(f"r{i}", 5, max_tokens=1))
    engine.step()
    assert [c.length for c in engine.steps[0].chunks] == [5, 5, 5]


def test_stop_ids_end_a_sequence_but_not_before_min_tokens() -> None:
    prompt = (1, 2, 3)
    first = next_token(prompt)
    config = make_config()
    engine = FakeEngine(config)
    engine.add(make_request("now", prompt, max_tokens=9, stop=(first,)))
    later = make_request("later", prompt, max_tokens=9, stop=(first,), min_tokens=2)
    engine.add(later)
    engine.run()
    assert (engine.outputs["now"], engine.reasons["now"]) == ([first], FinishReason.STOP)
    assert len(engine.outputs["later"]) >= 2
    assert (engine.outputs["later"], engine.reasons["later"]) == solo_run(later, config)


def test_a_stop_string_found_outside_ends_a_sequence() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 3))
    step = scheduler.schedule()
    assert step is not None
    (event,) = scheduler.commit(step, {"a": 7}, stopped={"a"})
    assert (event.token_id, event.finish_reason) == (7, FinishReason.STOP)
    assert not scheduler.has_work()
    scheduler.check_integrity()


def test_length_ends_at_max_model_len_and_at_the_pool() -> None:
    engine = FakeEngine(make_config(max_model_len=20))
    engine.add(make_request("a", 15, max_tokens=1_000))
    engine.run()
    assert len(engine.outputs["a"]) == 5
    assert engine.reasons["a"] is FinishReason.LENGTH

    engine = FakeEngine(make_config(num_blocks=4))  # 12 tokens, and one that is never computed
    engine.add(make_request("a", 10, max_tokens=1_000))
    engine.add(make_request("full", 12, max_tokens=1_000))
    engine.run()
    assert len(engine.outputs["a"]) == 3
    assert len(engine.outputs["full"]) == 1


def test_impossible_requests_are_refused_with_number_and_knob() -> None:
    scheduler = Scheduler(make_config(num_blocks=4, max_model_len=100))
    scheduler.add(make_request("a", 3))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", 3))
    with pytest.raises(RequestError, match="empty prompt"):
        scheduler.add(make_request("b", 0))
    with pytest.raises(RequestError, match=r"prompt of 100 tokens.*max_model_len 100"):
        scheduler.add(make_request("b", 100))
    with pytest.raises(CapacityError, match=r"prompt of 13 tokens.*holds 12 \(3 blocks of 4\).*num_blocks"):
        scheduler.add(make_request("b", 13))
    with pytest.raises(RequestError, match="max_tokens 0"):
        scheduler.add(make_request("b", 3, max_tokens=0))
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        make_config(num_blocks=1)
    with pytest.raises(ConfigError, match="watermark is 1"):
        make_config(watermark=1.0)


def test_the_latest_is_preempted_recomputed_and_not_sampled_again() -> None:
    # 8 blocks of 4: two prompts of 12 fit with 2 blocks to spare, both decoding to 24 tokens do not
    engine = FakeEngine(make_config(num_blocks=9, max_num_batched_tokens=32))
    requests = [make_request("early", 12, max_tokens=12), make_request("late", 12, max_tokens=12)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.num_recomputed_tokens == 16
    (at,) = [i for i, step in enumerate(engine.steps) if step.preempted]
    assert engine.steps[at].preempted == ("late",)
    recompute = [c for step in engine.steps[at:] for c in step.chunks if c.request_id == "late"]
    known = 12 + sum(c.samples for step in engine.steps[:at] for c in step.chunks if c.request_id == "late")
    assert recompute[0].start == 0
    assert recompute[0].end == known
    assert not recompute[0].is_decode
    assert recompute[0].samples
    for request in requests:
        name = request.request_id
        assert (engine.outputs[name], engine.reasons[name]) == solo_run(request, engine.config)


def test_a_preempted_sequence_waits_until_it_fits_whole_and_keeps_its_place() -> None:
    # 10 blocks; when "late" (12 tokens and what it generated) is preempted, "early" leaves it blocks for a first chunk
    # of 4 tokens long before there is room for all of it
    engine = FakeEngine(make_config(num_blocks=11, max_num_batched_tokens=6))
    requests = [make_request(name, 16, max_tokens=20) for name in ("early", "late")]
    for request in requests:
        engine.add(request)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.scheduler.num_free_blocks > 1
    engine.add(make_request("new", 2, max_tokens=1))
    engine.run()
    assert engine.scheduler.num_preemptions == 1
    order = [c.request_id for step in engine.steps for c in step.chunks if c.start == 0]
    assert order == ["early", "late", "late", "new"]
    for request in requests:
        assert engine.outputs[request.request_id] == solo_run(request, engine.config)[0]


def test_admission_leaves_the_watermark_free() -> None:
    scheduler = Scheduler(make_config(num_blocks=11, watermark=0.3, max_num_batched_tokens=64, prefill_quantum=64))
    scheduler.add(make_request("a", 28))  # 7 of 10 blocks
    scheduler.add(make_request("b", 1))
    step = scheduler.schedule()
    assert step is not None
    assert [c.request_id for c in step.chunks] == ["a"]
    scheduler.commit(step, {"a": 1})
    assert scheduler.abort("a")
    step = scheduler.schedule()
    assert step is not None
    assert [c.request_id for c in step.chunks] == ["b"]


def test_abort_waiting_prefilling_decoding_and_in_flight_frees_everything() -> None:
    engine = FakeEngine(make_config(max_num_seqs=3, max_num_batched_tokens=6), depth=1)
    free = (engine.scheduler.num_free_blocks, engine.scheduler.num_free_slots)
    engine.add(make_request("decoding", 2, max_tokens=50))
    engine.step()
    engine.step()
    engine.add(make_request("prefilling", 40))
    engine.step()
    engine.add(make_request("in flight", 1))
    engine.step()
    for i in range(3):
        engine.add(make_request(f"waiting {i}", 3))
    engine.step()
    assert engine.pending, "a step is in flight"
    assert {c.request_id for c in engine.pending[0][0].chunks} >= {"decoding", "in flight"}
    counts = {name: len(outputs) for name, outputs in engine.outputs.items()}
    for name in list(engine.tokens):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.scheduler.check_integrity()
    assert (engine.scheduler.num_free_blocks, engine.scheduler.num_free_slots) == free
    assert engine.scheduler.has_work(), "the step in flight must still be committed"
    assert engine.step() == []
    assert not engine.scheduler.has_work()
    assert {name: len(outputs) for name, outputs in engine.outputs.items()} == counts


def test_an_id_used_again_never_gets_the_old_request_s_token() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 2))
    old = scheduler.schedule()
    assert old is not None
    scheduler.abort("a")
    scheduler.add(make_request("a", 3))
    new = scheduler.schedule()
    assert new is not None
    assert scheduler.commit(old, {"a": 1}) == []
    (event,) = scheduler.commit(new, {"a": 2})
    assert event.token_id == 2


def test_steps_are_planned_ahead_up_to_the_known_end() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 3, max_tokens=3))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [None if s is None else (s.chunks[0].start, s.chunks[0].samples) for s in steps] == [
        (0, True),
        (3, True),
        (4, True),
        None,
    ]
    assert scheduler.schedule() is None
    ready = [step for step in steps if step is not None]
    with pytest.raises(AssertionError, match="step 1 is committed before step 0"):
        scheduler.commit(ready[1], {"a": 5})


def test_a_stop_with_a_step_in_flight_drops_that_step() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 3, max_tokens=9, stop=(5,)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    (event,) = scheduler.commit(first, {"a": 5})
    assert event.finish_reason is FinishReason.STOP
    assert scheduler.num_free_blocks == 100
    assert scheduler.commit(second, {"a": 6}) == []
    assert not scheduler.has_work()


def test_models_without_blocks_or_without_slots() -> None:
    for blocks, slots in ((False, True), (True, False)):
        engine = FakeEngine(make_config(uses_blocks=blocks, uses_slots=slots, num_blocks=101, num_slots=5))
        requests = [make_request(f"r{i}", 3 + 5 * i, max_tokens=5) for i in range(8)]
        for request in requests:
            engine.add(request)
        engine.run()
        for request in requests:
            assert engine.outputs[request.request_id] == solo_run(request, engine.config)[0]
        if not blocks:
            assert all(not c.block_ids for step in engine.steps for c in step.chunks)
        if not slots:
            assert all(c.slot == 0 for step in engine.steps for c in step.chunks)
