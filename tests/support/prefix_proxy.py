"""A reverse proxy that serves another server below a path prefix, which it strips, and nothing elsewhere."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding"}


class PrefixProxy:
    """Runs in threads until the context ends.

    Args:
        prefix: The path prefix, such as "/ml/backhaul".
        target: The URL of the server behind the proxy.

    Attributes:
        url: The URL of the root of the server as seen through the proxy; it ends with a slash.
    """

    def __init__(self, prefix: str, target: str) -> None:
        address = urlsplit(target).netloc

        class Handler(BaseHTTPRequestHandler):
            """Answers one request for each connection, so the end of an answer is the end of the connection."""

            def do_GET(self) -> None:
                self._pass_on()

            do_HEAD = do_POST = do_GET  # noqa: N815  http.server chooses methods by these names

            def _pass_on(self) -> None:
                if not self.path.startswith(f"{prefix}/"):
                    self.send_error(404)
                    return
                server = http.client.HTTPConnection(address, timeout=60)
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                server.request(self.command, self.path.removeprefix(prefix), body, _end_to_end(self.headers.items()))
                answer = server.getresponse()
                self.send_response_only(answer.status)
                for name, value in _end_to_end(answer.getheaders()).items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    while part := answer.read1():
                        self.wfile.write(part)
                except ConnectionError:
                    pass  # the browser or the server has gone
                finally:
                    answer.close()
                    server.close()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that `server_close` waits for them
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}{prefix}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _end_to_end(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _HOP_BY_HOP}
