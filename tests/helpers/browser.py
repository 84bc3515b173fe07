"""Headless Chromium, driven over its DevTools pipe: no driver program, no library, no port.

    Python --fd 3: {"id", "method", ..} NUL--> Chromium --fd 4: {"id", "result"} NUL--> Python

One page at a time; every call waits for its answer. What a page logs as an error is kept, so a
test can say that there was none.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--font-render-hinting=none",
)
TIMEOUT_S = 60.0
# Chromium reads commands from descriptor 3 and answers on 4, whatever else is there.
LAUNCHER = (
    "import fcntl, os, sys\n"
    "read, write = (fcntl.fcntl(int(a), fcntl.F_DUPFD, 10) for a in sys.argv[1:3])\n"
    "os.dup2(read, 3), os.dup2(write, 4)\n"
    "os.set_inheritable(3, True), os.set_inheritable(4, True)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "Tab": ("Tab", 9, ""),
}


def find_browser() -> str | None:
    """Where Chromium is, or None. GPURT_TEST_BROWSER names another one."""
    wanted = os.environ.get("GPURT_TEST_BROWSER")
    return (
        shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, CANDIDATES)), None)
    )


class BrowserError(AssertionError):
    """The browser ended, did not answer, or its page threw."""


class Browser:
    """A browser with one page. Use as a context manager."""

    def __init__(self, program: str, width: int = 1440, height: int = 900) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []  # what the page asked for, beside itself
        self._folder = tempfile.TemporaryDirectory(prefix="gpurt-browser-")
        self._number = 0
        self._buffer = b""
        self._start(program)
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session = self._call("Target.attachToTarget", attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _start(self, program: str) -> None:
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        options = [*FLAGS, f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe"]
        command = [sys.executable, "-c", LAUNCHER, str(read_there), str(write_there), program]
        self._process = subprocess.Popen(
            [*command, *options, "about:blank"],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._in, self._out = read_here, write_here

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and all its processes."""
        try:
            self._call("Browser.close", {})
        except (BrowserError, OSError):
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    # ---- page --------------------------------------------------------------------------------
    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it says that it is ready."""
        self.call("Page.navigate", {"url": "about:blank"})
        self.call("Page.navigate", {"url": path.resolve().as_uri() + fragment})
        self.wait("document.documentElement?.dataset.ready", 30.0)
        self.settle()

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Size of the page in CSS pixels, and device pixels for each."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """The colour scheme that the system prefers: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", {"features": features})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises: BrowserError if it throws."""
        parameters = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", parameters)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{text} - at {expression[:80]}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until an expression is true; its value."""
        until = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > until:
                raise BrowserError(f"still not true after {timeout_s:g} s - at {expression}")
            time.sleep(0.02)
        return value

    def settle(self) -> None:
        """Wait until animations have ended and all frames that were asked for are drawn."""
        self.wait("!gpurt.animation && !gpurt.frameAsked")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def text(self, selector: str) -> str:
        """What an element shows; a space is a space, whether lines may break there or not."""
        text = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(text).replace("\u00a0", " ")

    def screenshot(self, path: Path) -> None:
        """Write what the page shows as PNG."""
        data = self.call("Page.captureScreenshot", {"format": "png"})["data"]
        path.write_bytes(base64.b64decode(data))

    # ---- mouse and keys ----------------------------------------------------------------------
    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One mouse message: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Move there and click."""
        self.mouse("mouseMoved", x, y)
        for number in range(1, count + 1):
            button = {"button": "left", "clickCount": number}
            self.mouse("mousePressed", x, y, **button)
            self.mouse("mouseReleased", x, y, **button)

    def drag(
        self, from_xy: tuple[float, float], to_xy: tuple[float, float], shift: bool = False
    ) -> None:
        """Press, move in steps, release."""
        keys = {"modifiers": 8 if shift else 0}
        self.mouse("mouseMoved", *from_xy, **keys)
        self.mouse("mousePressed", *from_xy, button="left", clickCount=1, **keys)
        for i in range(1, 6):
            x, y = (a + (b - a) * i / 5 for a, b in zip(from_xy, to_xy, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1, **keys)
        self.mouse("mouseReleased", *to_xy, button="left", clickCount=1, **keys)

    def wheel(self, x: float, y: float, delta: float, shift: bool = False) -> None:
        """Turn the wheel by pixels."""
        keys = {"modifiers": 8 if shift else 0}
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=delta, **keys)

    def press(self, key: str) -> None:
        """Press and release a key: a character or a name in KEYS."""
        name, code, text = KEYS.get(key, (key, ord(key[0].upper()), key))
        down = {"key": name, "windowsVirtualKeyCode": code, "text": text}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", **down})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": name})

    def type(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", {"text": text})

    # ---- protocol ----------------------------------------------------------------------------
    def call(self, method: str, parameters: dict[str, Any] | None = None) -> Any:
        """One command to the page. Raises: BrowserError if it is refused."""
        return self._call(method, parameters or {}, self._session)

    def _call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{answer['error']['message']} - at {method}")
                return answer["result"]
            self._note(answer)

    def _receive(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer in {TIMEOUT_S:g} s - at {method}")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise BrowserError(f"the browser ended - at {method}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.requests.append(url)
