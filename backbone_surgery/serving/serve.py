"""`serve`: an OpenAI-compatible server over a model."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.chat import compile_template
from backbone_surgery.generation.controls import check_names
from backbone_surgery.numbers import is_int, read_number
from backbone_surgery.rewriting.rewrite import by_control
from backbone_surgery.serving.engine import Engine
from backbone_surgery.vectors import ControlVector

_MODULES = ("fastapi", "prometheus_client")
_SENT = re.compile("[!-~]([ -~]*[!-~])?")
"""What every client can send in a header as it is."""


def serve(
    lm: CachedCausalLM,
    host: str = "127.0.0.1",
    port: int = 8000,
    vectors: Mapping[str, ControlVector] | None = None,
    api_key: str | None = None,
    name: str | None = None,
    chat_template: str | None = None,
    warm_up: bool = True,
    controls: Mapping[str, float] | None = None,
    **engine: Any,
) -> None:
    """Serve a model over HTTP until the process is told to end.

    The routes are those of OpenAI, `/v1/completions` and `/v1/chat/completions`, with two more
    fields: `steering` for the controls of the model, and `capture` for what it captures. See
    docs/serving.md. On SIGTERM or SIGINT it finishes what runs, refuses what comes, and waits a
    minute for clients to read their answers.

    Args:
        lm: the model, with a preprocessor.
        host: the address to listen on; by default only this machine can connect.
        port: the port to listen on.
        vectors: named vectors that requests may steer by.
        api_key: that every request but for `/health` has to bring.
        name: of the model, for clients; by default that of its backbone.
        chat_template: a Jinja template, in the place of the one that comes with the tokenizer.
        warm_up: whether to compile the programs before the first request, but for those that
            log-probabilities of prompts need.
        controls: `{name: strength}` for requests that say none, such as those of a client that
            knows nothing of steering.
        **engine: see `Engine`.

    Raises:
        SurgeryError: a package of the extra `serve` is missing, an argument does not fit, or
            nothing can listen on the port.
    """
    check_server(host, port, api_key)
    app = make_server_app(lm, vectors, api_key, name, chat_template, warm_up, controls, **engine)
    from backbone_surgery.serving.web.ending import run

    run(app, app.state.engine, host, port)


def check_server(host: str, port: int, api_key: str | None) -> None:
    """Refuse what no server can be started with, before a model is loaded or compiled.

    Raises:
        SurgeryError: see `serve`.
    """
    is_text = isinstance(api_key, str)
    if api_key is not None and not (is_text and api_key and _SENT.fullmatch(api_key)):
        received = f"one of type {type(api_key).__name__}"
        if is_text:
            received = "one with other characters" if api_key else "an empty one"
        raise SurgeryError(
            "serve at 'api_key': expected a text of letters, digits and signs of ASCII, which all "
            f"clients can send, without a space at its ends. Received {received}. Pass such a key, "
            "or leave it out to let everybody in."
        )
    for module in (*_MODULES, "uvicorn"):
        import_extra("serve", module)
    if not is_int(port) or not 0 <= port < 2**16:
        raise SurgeryError(
            f"serve at 'port': expected a number from 0 to 65535. Received {shown(port)}. Pass one."
        )
    if not isinstance(host, str):
        raise SurgeryError(
            f"serve at 'host': expected the address to listen on. Received {shown(host)}. Pass "
            "'127.0.0.1', say."
        )
    asyncio.run(_bind(host, port))


async def _bind(host: str, port: int) -> None:
    """Bind a port as uvicorn will, and let go of it."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    except OSError as error:
        raise SurgeryError(
            f"serve: expected to listen on port {port} of {host}. Received an error: {error}. End "
            "what listens there, or choose another `port` or `host`."
        ) from error
    server.close()


def make_server_app(
    lm: CachedCausalLM,
    vectors: Mapping[str, ControlVector] | None = None,
    api_key: str | None = None,
    name: str | None = None,
    chat_template: str | None = None,
    warm_up: bool = True,
    controls: Mapping[str, float] | None = None,
    **engine: Any,
) -> Any:
    """Make the ASGI application that `serve` runs; see there."""
    for module in _MODULES:
        import_extra("serve", module)
    from backbone_surgery.serving.web.app import Service, make_app

    if not isinstance(lm, CachedCausalLM) or lm.preprocessor is None:
        raise SurgeryError(
            f"serve: expected a CachedCausalLM with a preprocessor, to read and make text. "
            f"Received {shown(lm)}. Load it with `from_preset`, or attach one."
        )
    if chat_template is not None:
        compile_template(chat_template)
    strengths = _read_strengths(controls, lm)
    running = Engine(lm, **engine)
    name = name or lm.backbone.name
    service = Service(running, name, vectors or {}, api_key, chat_template, strengths)
    if warm_up:
        running.warm_up(captures=bool(lm.opened.captures))
    return make_app(service)


def _read_strengths(controls: Any, lm: CachedCausalLM) -> dict[str, float]:
    strengths = {}
    known = sorted({*by_control(lm.opened.rewrites), *lm.opened.inputs_by_hand})
    for name, value in check_names("serve", controls, known).items():
        strength = read_number(value)
        if strength is None:
            raise SurgeryError(
                f"serve at control '{name}': expected its strength, a number. Received "
                f"{shown(value)}. Pass 1.5, say."
            )
        strengths[name] = strength
    return strengths
