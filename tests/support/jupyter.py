"""JupyterLab on a folder, opened in a real browser without a network."""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import NOTEBOOKS, committed_root
from processes import environment_with_package, free_port

STARTS_S = 120
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def lab(folder: Path, notebook: str) -> Iterator[str]:
    """The address of a copy of the notebook in JupyterLab, whose root is `folder`; the project's
    runs lie beside it. Nothing of the user's own settings is read or written."""
    (folder / "notebooks").mkdir()
    shutil.copy(NOTEBOOKS / notebook, folder / "notebooks")
    (folder / "runs").symlink_to(committed_root())
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "RUNTIME")}
    own |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "NSA_HEADLESS": "0"}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTER_PLATFORM_DIRS": "1"}
    news = folder / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", "--allow-root",
               "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True",
               f"--ServerApp.root_dir={folder}"]  # fmt: skip
    with (folder / "lab.log").open("w") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
        server = subprocess.Popen(command, env=environment_with_package() | own, **options)
        try:
            address = f"http://127.0.0.1:{port}/lab/tree/notebooks/{notebook}"
            _wait_for(f"http://127.0.0.1:{port}/api/status", server, folder / "lab.log")
            yield address
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


@contextmanager
def browser_page(width: int = 1400, height: int = 1100):
    """A page of a real chromium, and the list of what its console says went wrong. Skips where
    there is no browser."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            wrong: list[str] = []
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda m: m.type == "error" and wrong.append(m.text))
            yield page, wrong
        finally:
            browser.close()


def run_all(page) -> None:
    """Every cell of the open notebook, as Run All does; returns when the kernel rests."""
    page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.sessionContext?.isReady",
                           timeout=120_000)  # fmt: skip
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
