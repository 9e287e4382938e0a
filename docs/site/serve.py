# SPDX-License-Identifier: Apache-2.0
"""Serves the built site on this host until it is interrupted.

./bazelw run //docs:serve -- --port=8080
"""

import argparse
import contextlib
import functools
import http.server


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder")
  parser.add_argument("--port", type=int, default=8000)
  args = parser.parse_args()
  handler = functools.partial(
    http.server.SimpleHTTPRequestHandler, directory=args.folder
  )
  address = ("127.0.0.1", args.port)
  with http.server.ThreadingHTTPServer(address, handler) as server:
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      server.serve_forever()


if __name__ == "__main__":
  main()
