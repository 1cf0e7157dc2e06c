"""Streams: whole characters, in the order in which they are written, ended whatever happens."""

import asyncio
import threading

import pytest
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

from hf_ensemble import MemberError
from tests.bug_bank.kit import control_tokens_may_be_chosen, duet, members_may_be_lossy
from tests.contracts import CORE_RECIPES, Recorder

pytestmark = [control_tokens_may_be_chosen, members_may_be_lossy]

PROMPT = "Say "
WHOLE = "Say 今天天气很好。 😀 👍🏽 ไทย, and so on:\n\tshe sells\n  sea shells."
each_method = pytest.mark.parametrize("method", ["gac", "unite", "sweetspan"])


def writing(method):
    return duet(("smol", "gemma"), WHOLE, method=method)


def options_for(ensemble, streamer, **options):
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt")
    return {**inputs, "streamer": streamer, "max_new_tokens": 120, "do_sample": False, **options}


@each_method
def test_pieces_are_whole_characters_and_make_up_the_final_text(method):
    ensemble = writing(method)
    streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(ensemble.generate(**options_for(ensemble, streamer))))
    thread.start()
    pieces = list(streamer)
    thread.join(60)
    assert all("\ufffd" not in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 8
    text = ensemble.tokenizer.decode(outputs[0][0], skip_special_tokens=True)
    assert PROMPT + "".join(pieces) == text == WHOLE


@each_method
def test_an_event_loop_can_read_the_stream(method):
    ensemble = writing(method)

    async def read():
        streamer = AsyncTextIteratorStreamer(
            ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60
        )
        running = asyncio.to_thread(ensemble.generate, **options_for(ensemble, streamer))
        task = asyncio.create_task(running)
        pieces = [piece async for piece in streamer]
        return pieces, await task

    pieces, output = asyncio.run(read())
    assert all("\ufffd" not in piece for piece in pieces)
    assert PROMPT + "".join(pieces) == ensemble.tokenizer.decode(output[0], skip_special_tokens=True) == WHOLE


@each_method
def test_one_token_at_a_time_reaches_the_streamer(method):
    """Spans too are handed out id by id."""
    ensemble = writing(method)

    class Counting(Recorder):
        def put(self, value):
            sizes.append(value.numel())
            super().put(value)

    sizes: list[int] = []
    streamer = Counting(ensemble.tokenizer)
    output = ensemble.generate(**options_for(ensemble, streamer))
    assert set(sizes[1:]) == {1}
    assert streamer.ids == output[0].tolist()
    assert streamer.num_ends == 1


class Failing(RuntimeError):
    pass


def fail(context):
    raise Failing("the member broke")


@each_method
def test_a_stream_ends_when_a_member_fails_and_the_error_is_seen(method):
    """I4: In a thread and in an event loop; what the reader awaits afterwards raises."""
    ensemble = writing(method)
    script = ensemble.members[1].script
    calls = []

    def breaking(context):
        calls.append(context)
        return fail(context) if len(calls) > 3 else script(context)

    ensemble.members[1].script = breaking

    async def read():
        streamer = AsyncTextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, timeout=60)
        running = asyncio.to_thread(ensemble.generate, **options_for(ensemble, streamer))
        task = asyncio.create_task(running)
        pieces = [piece async for piece in streamer]
        await task
        return pieces

    with pytest.raises(MemberError, match="the member broke"):
        asyncio.run(read())


def test_a_streamer_that_fails_to_end_does_not_hide_the_error():
    """An event loop that was closed meanwhile, say."""
    ensemble = writing("unite")
    ensemble.members[1].script = fail

    class Closed(Recorder):
        def end(self):
            raise RuntimeError("Event loop is closed")

    with pytest.raises(MemberError, match="the member broke"):
        ensemble.generate(**options_for(ensemble, Closed(ensemble.tokenizer)))


def test_a_failing_streamer_is_told_the_end_once():
    ensemble = CORE_RECIPES[0].ensemble
    ends = []

    class Breaking(Recorder):
        def put(self, value):
            if self.ids:
                raise Failing("full")
            super().put(value)

        def end(self):
            ends.append(1)
            super().end()

    with pytest.raises(Failing):
        ensemble.generate(**options_for(ensemble, Breaking(ensemble.tokenizer), max_new_tokens=3))
    assert ends == [1]


@each_method
def test_two_streams_at_once_are_each_alone(method):
    """H6: The pieces of one never reach the other."""
    ensemble = writing(method)

    def read(found):
        streamer = TextIteratorStreamer(ensemble.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
        thread = threading.Thread(target=ensemble.generate, kwargs=options_for(ensemble, streamer))
        thread.start()
        found.append("".join(streamer))
        thread.join(120)

    found: list[str] = []
    threads = [threading.Thread(target=read, args=(found,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [WHOLE.removeprefix(PROMPT)] * 2
