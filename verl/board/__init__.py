"""What happened in a run: a store of its steps and samples, a page that shows it, comparisons.

    trainer --(columns, metrics)--> writer process --(StoreWriter)--> board.sqlite
                                                                           ^
                                               page, comparisons <-- StoreReader

`python -m verl.board FOLDER` serves the page; `--export FILE` writes it, data inside, to one file.
"""
