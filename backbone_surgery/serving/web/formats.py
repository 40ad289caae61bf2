"""Response formats that clients ask for, prepared where nobody else waits for them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.formats.table import is_made, table_of
from backbone_surgery.serving.scheduler import QueueFullError
from backbone_surgery.serving.web.body import Completion

_AT_ONCE, _MOST = 2, 16


class FormatPreparation:
    """Makes the tables of response formats, two at once; more than 16 are refused.

    A format may take a minute. Requests with others, or with one that is made, go on meanwhile.

    Args:
        lm: the model of the server.
    """

    def __init__(self, lm: CachedCausalLM) -> None:
        self._lm = lm
        self._threads = ThreadPoolExecutor(_AT_ONCE, "formats")
        self._count = 0

    async def prepare(self, body: Completion) -> ResponseFormat | None:
        """Return the format that a request asks for, once its table is made.

        Raises:
            QueueFullError: too many are being made.
            SurgeryError: the model cannot keep to it.
        """
        if body.response_format is None and body.structured_outputs is None:
            return None
        wanted = await asyncio.to_thread(lambda: body.wanted_format)
        arguments = self._lm.preprocessor.tokenizer, self._lm.programs.head.input_dim
        if wanted is None or is_made(wanted, *arguments):
            return wanted
        if self._count >= _MOST:
            raise QueueFullError("response_format: expected fewer at once. Received one more.")
        self._count += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, table_of, wanted, *arguments)
        finally:
            self._count -= 1
        return wanted
