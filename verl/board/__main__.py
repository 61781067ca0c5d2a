"""Look at runs in the browser: `python -m verl.board FOLDER [FOLDER ...] [--export FILE]`."""

import argparse
import sys
from pathlib import Path

from verl.board.serving import Board, NoStore, board_server, page_address


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.board", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or above them")
    parser.add_argument("--export", type=Path, help="write one HTML file that needs no server")
    parser.add_argument(
        "--samples", type=int, default=2000, help="samples of each run in an export"
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    options = parser.parse_args(arguments)
    try:
        board = Board(options.runs)
    except NoStore as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.export is not None:
        options.export.write_text(board.exported(options.samples), encoding="utf-8")
        size = options.export.stat().st_size / 1e6
        sys.stdout.write(f"wrote {options.export} ({size:.1f} MB)\n")
        return 0
    server = board_server(board, port=options.port)
    sys.stdout.write(f"run page: {page_address(server)}   (Ctrl-C ends it)\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
