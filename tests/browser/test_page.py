"""The page in headless Chromium: send, stream, stop, regenerate, edit, reload. Run by `make test-browser`.

With SCREENSHOTS=FOLDER pictures of its states are left there, to be looked at.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

from soloist.generation import Generation
from tests.clients.served import served
from tests.server.client import make_tokenizer, scripted_llm

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

SAID = (
    "The quick brown fox jumps over the lazy dog, because the dog does not mind.\n\n"
    "  1. It is quick.\n  2. It is brown.\n  3. It jumps over everything that is lazy, dogs above all: 안녕 🎉\n\n"
    "def f(x):\n    return x\n"
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def url(tmp_path, monkeypatch):
    """A server that says `SAID` in steps of one to eight tokens, some milliseconds each."""
    tokenizer = make_tokenizer(tmp_path)
    ids = tokenizer.encode(SAID)
    groups, sizes = [], [4, 1, 7, 2, 8, 3, 5, 1, 6]
    while ids:
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[:size])
        ids = ids[size:]
    real = Generation._take_record

    def take(self, record):
        time.sleep(0.02)
        return real(self, record)

    monkeypatch.setattr(Generation, "_take_record", take)
    with served(scripted_llm(tokenizer, groups), bandwidth_gb_per_s=20.0) as (address, _app):
        yield address


@pytest.fixture
def page(browser, url):
    context = browser.new_context(viewport={"width": 1180, "height": 760})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert [error for error in errors if "400" not in error] == []


def picture(page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def send(page, text: str) -> None:
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def said_at_least(page, num_chars: int) -> None:
    """Wait for so much of an answer. Not with a script: the page's own policy forbids evaluating one."""
    said = page.locator(".assistant .said")
    for _ in range(1000):
        if said.count() and len(said.inner_text()) > num_chars:
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"fewer than {num_chars} characters came")


def finished(page) -> None:
    page.wait_for_selector("article.assistant:not(.running)", timeout=20_000)
    page.wait_for_selector("#send:visible", timeout=20_000)


def test_a_message_is_streamed_and_what_it_took_is_shown(page):
    picture(page, "empty")
    send(page, "Tell me about the fox.")
    said_at_least(page, 60)
    assert page.is_visible("#stop") and not page.is_visible("#send")
    picture(page, "streaming")
    finished(page)
    assert page.inner_text(".assistant .said").strip() == SAID.strip()
    assert float(page.inner_text("#per-step")) > 2 and int(page.inner_text("#rate")) > 10
    page.wait_for_selector("#requests li")
    page.click("#requests summary")
    assert "queue_ms" in page.inner_text("#requests dl")
    picture(page, "finished")


def test_stop_ends_the_answer_and_keeps_what_was_said(page):
    send(page, "Go on.")
    said_at_least(page, 20)
    page.keyboard.press("Escape")
    page.wait_for_selector("#state:has-text('after stop')")
    said = page.inner_text(".assistant .said")
    assert 20 < len(said) < len(SAID) and SAID.startswith(said.strip()[:20])
    page.wait_for_selector("#requests li")
    assert "cancelled" in page.inner_text("#requests li")


def test_an_answer_is_made_again_and_a_question_changed(page):
    send(page, "First.")
    finished(page)
    page.hover("article.assistant")
    page.click("article.assistant button:has-text('Regenerate')")
    finished(page)
    assert page.locator("article").count() == 2
    page.hover("article.user")
    page.click("article.user button:has-text('Edit')")
    assert page.input_value("#text") == "First."
    page.fill("#text", "Second.")
    page.keyboard.press("Enter")
    finished(page)
    assert page.inner_text("article.user .said") == "Second." and page.locator("article").count() == 2


def test_a_conversation_survives_a_reload(page):
    page.fill("#system", "Be brief.")
    page.press("#system", "Tab")
    page.focus("#text")
    send(page, "Stay.")
    finished(page)
    page.reload()
    assert page.inner_text("article.user .said") == "Stay."
    assert page.input_value("#system") == "Be brief."
    page.keyboard.press("Alt+n")
    assert page.locator("article").count() == 0


def test_an_error_is_shown_and_the_next_message_works(page):
    page.fill("#max_tokens", "100000")
    page.focus("#text")
    send(page, "Too much.")
    page.wait_for_selector("article.failed")
    assert "ask for at most" in page.inner_text("article.failed .said")
    picture(page, "error")
    page.fill("#max_tokens", "")
    page.focus("#text")
    send(page, "Better.")
    page.wait_for_selector("article.assistant:not(.failed):not(.running)", timeout=20_000)
    assert page.locator("article.failed").count() == 0


def test_a_narrow_dark_screen_shows_everything(browser, url):
    context = browser.new_context(viewport={"width": 390, "height": 760}, color_scheme="dark")
    page = context.new_page()
    page.goto(url)
    page.focus("#text")
    send(page, "Hello from a small screen, with a question that takes more than one line of it.")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    picture(page, "narrow")
    page.click("#toggle-panel")
    assert page.is_visible("#system")
    picture(page, "narrow-settings")
    context.close()
