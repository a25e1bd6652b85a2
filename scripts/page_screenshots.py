"""Takes the pictures of the page for docs/: `page_screenshots.py URL docs/img NAME...`, against a running server.

Run it with the lane's environment (`scripts/web_lane.sh` makes it): .venv-web/bin/python scripts/page_screenshots.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
QUESTION = "Write a short poem about the sea."


def ask(page: Page, mode: str, *, most: int) -> None:
    """One question, answered to the end."""
    page.select_option("#mode", mode)
    page.fill("#max-tokens", str(most))
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.wait_for_selector('#talk[aria-busy="false"]', timeout=240_000)


def main(url: str, folder: Path, wanted: list[str]) -> None:
    """Desk in light and dark, and a phone: those named, or all."""
    shots = [
        ("page-light", {"width": 1100, "height": 700}, "light", "on", 120),
        ("page-compare-dark", {"width": 1100, "height": 700}, "dark", "both", 120),
        ("page-phone", {"width": 390, "height": 780}, "light", "on", 70),
    ]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, size, scheme, mode, most in shots:
            if wanted and name not in wanted:
                continue
            page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1)
            page.goto(url)
            page.wait_for_selector('#state[data-state="ready"]', timeout=120_000)
            ask(page, mode, most=most)
            page.wait_for_timeout(3500)  # the state of the server is asked for every three seconds
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
