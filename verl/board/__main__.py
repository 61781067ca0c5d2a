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
        return refused(str(error))
    for reason in board.unreadable.values():
        sys.stderr.write(f"note: left out: {reason}\n")
    if options.export is not None:
        return export(board, options.export, options.samples)
    try:
        server = board_server(board, port=options.port)
    except (OSError, OverflowError) as error:
        return refused(f"--port {options.port} cannot be used: {error}; 0 takes a free one")
    sys.stdout.write(f"run page: {page_address(server)}   (Ctrl-C ends it)\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


def export(board: Board, file: Path, num_samples: int) -> int:
    try:
        text = board.exported(num_samples)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except NoStore as error:
        return refused(str(error))
    except OSError as error:
        return refused(f"--export {file} cannot be written: {error.strerror}; name another file")
    sys.stdout.write(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def refused(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
