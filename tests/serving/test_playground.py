"""The playground in a real browser, headless: Debian's `chromium`, by playwright."""

import contextlib
import shutil

import pytest

import backbone_surgery as bs
from tests.serving.test_server import Server, lm  # noqa: F401 - a fixture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium"),
]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(lm, browser):  # noqa: F811
    """Open the playground of a model, set to write 24 likeliest tokens."""
    with Server(lm) as server:
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{server.url}/")
        page.wait_for_selector(".control")
        page.fill("#tokens", "24")
        page.fill("#temperature", "0")
        yield page
        page.close()
        assert not problems


@pytest.fixture
def page(lm, browser):  # noqa: F811
    with opened(lm, browser) as page:
        yield page


def edited(*edit):
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    toned = bs.CachedCausalLM(bs.operate(plain.backbone, edit), plain.preprocessor)
    toned.compile(sampler="greedy")
    return toned


def wait_for(page, text):
    page.wait_for_function("text => document.querySelector('.out').innerText === text", arg=text)


def texts(page, columns=3):
    """Generate, wait until all columns are coloured, and return their texts."""
    page.click("#go")
    for i in range(columns):
        page.wait_for_selector(f".column:nth-child({i + 1}) .out span[title], #error:not(:empty)")
        assert page.inner_text("#error") == ""
    return [node.inner_text() for node in page.query_selector_all(".out")]


def test_text_streams_into_three_columns_as_generate_gives_it(page, lm):  # noqa: F811
    got = texts(page)
    for text, strength in zip(got, (-1.5, 0, 1.5), strict=True):
        wanted = lm.generate("Once upon a time", max_new_tokens=24, controls={"mood": strength})
        assert text == wanted
    assert len(set(got)) == 3
    steered = [node.inner_text() for node in page.query_selector_all("#graph .steered")]
    blocks = bs.ControlVector.from_preset("tiny_gpt2", "mood").directions
    assert list(blocks) == list(bs.ControlVector.from_preset("tiny_gpt2", "pet").directions)
    assert steered == [f"blocks.{i} ← mood, pet" for i in blocks]


def test_a_slider_changes_the_text(page):
    before = texts(page)
    page.focus("#strength-pet")
    for _ in range(25):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#number-pet") == "2.5"
    after = texts(page)
    assert before != after


def test_a_vector_can_act_on_the_last_token_of_the_prompt(page, lm):  # noqa: F811
    page.select_option("#tokens-mood", "last")
    got = texts(page)
    control = bs.Control(-1.5, tokens="last")
    assert got[0] == lm.generate("Once upon a time", max_new_tokens=24, controls={"mood": control})
    assert got[0] != lm.generate("Once upon a time", max_new_tokens=24, controls={"mood": -1.5})


def test_bad_input_shows_the_error(page):
    page.fill("#strengths", "1, happy")
    page.click("#go")
    assert "numbers separated by commas" in page.inner_text("#error")
    page.fill("#strengths", "1")
    page.fill("#tokens", "5000")
    page.click("#go")
    page.wait_for_selector("#error:not(:empty)")
    assert "tokens" in page.inner_text("#error")
    page.fill("#tokens", "5")
    assert texts(page, columns=1)
    assert page.inner_text("#error") == ""


def test_numbers_may_lie_between_steps_and_none_may_be_left_out(page):
    page.fill("#strengths", "1")
    page.fill("#temperature", "0.75")
    page.fill("#top_p", "0.92")
    page.fill("#repetition", "1.15")
    with page.expect_request("**/v1/completions") as request:
        assert texts(page, columns=1)
    assert request.value.post_data_json["temperature"] == 0.75
    assert request.value.post_data_json["top_p"] == 0.92
    assert request.value.post_data_json["repetition_penalty"] == 1.15
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    for field in ("tokens", "temperature", "top_k", "top_p", "repetition", "seed"):
        old = page.input_value(f"#{field}")
        page.fill(f"#{field}", "")
        page.click("#go")
        page.press("#prompt", "Control+Enter")
        page.fill(f"#{field}", old)
    assert not sent
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".out span[title]")
    assert [url.rpartition("/")[2] for url in sent] == ["completions", "mood"]


def test_what_is_shown_can_be_copied(page):
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; }")
    page.click("#python")
    page.wait_for_selector("#said:not(:empty)")
    python = page.evaluate("window.copied")
    compile(python, "copied", "exec")
    assert '"strength":-1.5' in python
    page.click("#curl")
    assert page.evaluate("window.copied").startswith("curl http://127.0.0.1:")
    assert all(
        "BACKBONE_SURGERY_API_KEY" in text for text in (python, page.evaluate("window.copied"))
    )


def test_a_control_whose_default_steers_is_off_at_0(browser):
    """The server knows no vector of the edit's, so there is none to colour along."""
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    toned = edited(bs.Steer("tone", vector, strength=1.0), bs.Capture("blocks.*"))
    with opened(toned, browser) as page:
        colours = page.eval_on_selector_all("#colour option", "all => all.map((o) => o.text)")
        assert colours == ["nothing"]
        page.fill("#strengths", "0")
        with page.expect_response("**/v1/completions") as answer:
            page.click("#go")
        answer.value.finished()
        wanted = toned.generate("Once upon a time", max_new_tokens=24, controls={"tone": 0.0})
        wait_for(page, wanted)
        assert page.inner_text("#error") == ""


def test_a_control_of_an_edit_begins_as_the_edit_has_it(browser):
    """Its strength is between steps of the slider, and beyond it; its tokens are a range."""
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    toned = edited(
        bs.Steer("tone", vector, tokens=(2, 9), strength=4.63),
        bs.Steer("touch", vector, tokens="generated", strength=-0.27),
    )
    with opened(toned, browser) as page:
        page.select_option("#compare", "")
        assert page.inner_text("#number-tone") == "4.63"
        assert page.inner_text("#number-touch") == "-0.27"
        page.click("#go")
        wait_for(page, toned.generate("Once upon a time", max_new_tokens=24))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_a_phone(lm, browser, scheme):  # noqa: F811
    with Server(lm) as server:
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page.goto(f"{server.url}/")
        page.wait_for_selector(".control")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.close()
