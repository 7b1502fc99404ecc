"""Take a screenshot of the page during denoising: `python docs/picture.py LINK docs/img/demo.png`.

LINK is the link with the key that `d1 serve` prints on a terminal. Needs Chromium, as the page's tests do.
"""

from __future__ import annotations

import argparse
import shutil

from playwright.sync_api import Page, sync_playwright

_CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 300_000
_SHARE_COMMITTED = """share => {
  const slots = document.querySelectorAll(".canvas .slot").length;
  return slots > 0 && document.querySelectorAll(".canvas .slot:not(.masked)").length / slots >= share;
}"""


def _take(page: Page, link: str, out: str, prompt: str | None, share: float) -> None:
    page.goto(link)
    if prompt is None:
        page.locator("#chips button").first.click()
    else:
        page.fill("#prompt", prompt)
        page.click("#ask")
    page.wait_for_function(_SHARE_COMMITTED, arg=share, timeout=_PATIENCE_MS)
    # Avoid the hover effects of buttons and of cells that have just changed.
    page.mouse.move(0, 0)
    page.screenshot(path=out, animations="disabled", full_page=True)


def main() -> None:
    """Send a request, wait, and write the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link")
    parser.add_argument("out")
    parser.add_argument("--prompt", help="left out: the first that the page offers")
    parser.add_argument("--share", type=float, default=0.5, help="share of committed slots; 1: the whole answer")
    given = parser.parse_args()
    path = next(filter(None, map(shutil.which, _CHROMIUM)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        # `wait_for_function` evaluates a string. The content security policy forbids that, and it would wait forever.
        page = browser.new_page(viewport={"width": 1000, "height": 600}, device_scale_factor=1.5, bypass_csp=True)
        _take(page, given.link, given.out, given.prompt, given.share)
        browser.close()


if __name__ == "__main__":
    main()
