"""Answers: what they cost, and how they end, whatever the engine does."""

import asyncio
from types import SimpleNamespace

from backbone_surgery.serving.web.answers import Answer


class Stop(str):
    """A stop sequence that counts how often it is compared."""

    compared = 0

    def startswith(self, *args):
        type(self).compared += 1
        return super().startswith(*args)


def test_a_long_text_is_compared_with_stops_at_its_end_alone():
    text = "abc " * 500 + "z"
    request = SimpleNamespace(finish_reason=None, listen=print, added_text=lambda: text)

    async def visible():
        return await Answer([request], "tiny", False, stops=[Stop("zzz"), Stop("yy")])._visible(0)

    assert asyncio.run(visible()) == text[:-1]
    assert Stop.compared <= 6
